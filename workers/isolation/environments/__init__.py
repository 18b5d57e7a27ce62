"""What a model talks to in its turns, and the processes in which that runs."""
