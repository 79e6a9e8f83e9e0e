"""The volunteer's program: dilocox-peer. A supervisor, its rank processes and a live view."""
