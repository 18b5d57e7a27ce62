"""Training API: a client's calls train a running group of ranks, in place of the DAG's nodes.

    client ── HTTP ──▶ TrainingServer ── TrainingCall ──▶ TrainingCalls, on rank 0 ── broadcast ──▶ all ranks
                              ◀── answer of rank 0 ──            ◀── each rank's part of the result ──

    requests   what calls say
    server     HTTP on rank 0: the token, the order of calls, and which of them are retries
    calls      answers calls on all ranks, by their engines
    losses     the loss functions by name
"""
