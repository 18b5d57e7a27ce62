"""GRPO as a loop of one's own, for a notebook: the run has the model and its engines, and this process the algorithm.

    python examples/notebook_loop/notebook_loop.py
"""

import distflow


def train(client, steps, reward, group_size=8):
    """Return the mean reward of each step."""
    means = []
    while client.step < steps:
        try:
            prompts = client.prompts()
            groups = client.sample(prompts, num_samples=group_size).result()
            rows, rewards = [], []
            for prompt, group in zip(prompts, groups):
                scores = [reward(each.text, prompt.answer) for each in group]
                mean = sum(scores) / len(scores)
                rows += [each.row(advantages=score - mean) for each, score in zip(group, scores)]
                rewards += scores
            client.forward_backward(rows, "importance_sampling")
            client.optim_step().result()
            means.append(sum(rewards) / len(rewards))
        except distflow.StepLost:
            continue  # a worker has died: the step begins again
    return means


def last(text):
    """Return what stands behind the working: the data's answers are whole solutions, as "12 + 5 = 17 #### 17"."""
    return text.rsplit("####", 1)[-1].strip()


if __name__ == "__main__":
    run = distflow.run("grpo", set={"training_api": "localhost", "steps": 30, "validation": None}, ranks=2, quiet=True)
    print(train(distflow.training_client(run), 30, lambda text, answer: float(last(text) == last(answer))))
    run.wait()
