"""State on disk: checkpoints of a rank, and the trained model as a Hugging Face directory."""
