"""Endpoint through which agents sample: an OpenAI-compatible API on the loopback address.

    messages   what requests say, and the bodies of answers
    dialogue   the one trajectory of a row: which tokens each request adds to it
    server     HTTP, tokens and limits; hands each turn to the thread that samples it
"""
