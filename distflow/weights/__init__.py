"""Weights from trainers to rollouts. Enter by `publisher`, whose head has the way of a version; a new transport goes to
`transport/`, `reshard` is for one device."""
