"""Not Python."""

def broken(:
    pass
