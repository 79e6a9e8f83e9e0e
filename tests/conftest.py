"""What holds for every test."""

import os

# No test asks a hub, and none waits for one: what the tests read is in the package or made by them.
os.environ["HF_HUB_OFFLINE"] = "1"
# Several processes share the machine, and matrix products have the same bits on every one.
os.environ["OMP_NUM_THREADS"] = "1"
