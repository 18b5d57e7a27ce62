"""An agent of your own, which owns its loop: it asks the model, and does sums for it, until the model gives an answer.

It knows nothing of distflow. The model is where OPENAI_BASE_URL and OPENAI_API_KEY say; the last line that it prints is
its reward. A model may call the tool, or end what it says with a sum, as `3 + 4 =`.
"""

import json
import re
import sys

from openai import BadRequestError, OpenAI  # pip install openai

SUM = re.compile(r"(-?\d{1,9}) *([-+*]) *(-?\d{1,9}) *=?\s*$")
TOOL = {"type": "function", "function": {
    "name": "calculate", "description": "Compute a sum, a difference or a product of two whole numbers.",
    "parameters": {"type": "object", "required": ["sum"], "properties": {
        "sum": {"type": "string", "description": "as 3 + 4"}}}}}


def calculate(text: str) -> str | None:
    """Return the result of the sum at the end of a text; None if there is none."""
    found = SUM.search(text)
    if found is None:
        return None
    left, right = int(found[1]), int(found[3])
    return str(left + right if found[2] == "+" else left - right if found[2] == "-" else left * right)


def tool_answers(message) -> list[dict[str, str]]:
    """Return what to answer to a turn of the model; [] if it was the last."""
    if message.tool_calls:
        asked = [(call.id, str(json.loads(call.function.arguments).get("sum"))) for call in message.tool_calls]
        return [{"role": "tool", "tool_call_id": id, "content": calculate(text) or "no sum"} for id, text in asked]
    result = calculate(message.content or "")
    return [] if result is None or "####" in message.content else [{"role": "user", "content": result}]


def solve(question: str) -> str:
    """Return the last thing that the model says."""
    client, messages = OpenAI(), [{"role": "user", "content": question}]
    while True:
        try:
            turn = client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        except BadRequestError:  # the limit of turns or tokens
            return ""
        answers = tool_answers(turn)
        if not answers:
            return turn.content or ""
        messages += [turn, *answers]


if __name__ == "__main__":
    question, answer = sys.argv[1:]
    said, right = (text.rpartition("####")[2].strip() for text in (solve(question), answer))
    print(json.dumps({"reward": float(said == right)}))
