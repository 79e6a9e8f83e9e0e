"""The model of benchmarks and tests whose subject is not the model, as lines of a run.toml."""

__all__ = ["TINY_LLAMA"]

TINY_LLAMA = """\
[model.config]
model_type = "llama"
vocab_size = 2048
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 2
num_key_value_heads = 2
"""
