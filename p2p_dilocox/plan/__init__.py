"""What a run needs and how fast it can be, before anybody starts it: memory, traffic, time."""
