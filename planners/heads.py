"""Does each role's model say what the functions that use it ask: a vocabulary, or one number for each token?"""

from __future__ import annotations

from distflow.schema.contract import ENGINE_TYPES, Contract
from distflow.schema.errors import Mistake
from distflow.schema.spec import Spec

_SAYS = {"lm": "a vocabulary (head: lm)", "value": "one number for each token (head: value)"}


def check_heads(spec: Spec, bound: dict[str, Contract], roles: list[str]) -> list[Mistake]:
    """Functions on roles with the other head, and the heads of `roles` that their models' folders cannot give."""
    found = [_of_node(spec, node, contract) for node, contract in bound.items()]
    found += [_of_folder(spec, role) for role in roles]
    return [mistake for mistake in found if mistake]


def _of_node(spec: Spec, node: str, contract: Contract) -> Mistake | None:
    name, marks = spec.dag.nodes[node].role, contract.marks
    role = spec.dag.roles.get(name)
    doubtful = any(path[:2] == ("roles", name) for path in spec.dag_source.doubtful)
    if role is None or doubtful or marks.type not in ENGINE_TYPES or marks.head in (None, role.head):
        return None
    what = (f"node `{node}`: function `{contract.name}` needs a model that gives {_SAYS[marks.head]}, and that of role "
            f"`{name}` gives {_SAYS[role.head]}")
    fitting = [f"`{other}`" for other, item in spec.dag.roles.items() if item.head == marks.head]
    hint = f"Give the node another role ({', '.join(fitting)}), or instead:" if fitting else "Instead:"
    hint += f"  {name}: {{…, head: {marks.head}}}"
    return Mistake(what, spec.dag_source.spot(("nodes", node, "role")), hint)


def _of_folder(spec: Spec, name: str) -> Mistake | None:
    """A frozen head must come with the model; a trained one may start anew where it is a value head."""
    role, shape = spec.dag.roles[name], spec.shape_of(name)
    if shape is None:
        return None
    where, hint = spec.dag_source.spot(("roles", name), key=True), ""
    if role.head == "lm" and shape.labels is not None:
        what = f"role `{name}` needs a model with a vocabulary, and its folder holds a classifier"
        hint = f"Give it a language model, or instead:  {name}: {{…, head: value}}"
    elif role.head == "value" and shape.labels not in (None, 1):
        what = f"role `{name}` gives one number for each token, and the classifier in its folder {shape.labels}"
        hint = "Give it a reward model, which has a single label, or a language model."
    elif role.head == "value" and shape.labels is None and not role.trained:
        what = f"role `{name}` is not trained, and its model has no value head: it would give 0 for everything"
        hint = ("Give it the folder of a trained one (`reward_model.yaml` trains one):  "
                f"--set roles.{name}.model=FOLDER")
    else:
        return None
    return Mistake(what, where, hint)
