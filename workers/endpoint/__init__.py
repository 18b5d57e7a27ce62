"""Endpoint through which agents sample: an OpenAI-compatible API on the loopback address.

    messages      what requests say, and the bodies of answers
    dialogue      the one trajectory of a row: which tokens each request adds to it
    http_server   HTTP, tokens and limits, also of the training API
    server        hands each turn of a row to the thread that samples it
"""
