"""Text to tokens, and tokens to batches."""

from p2p_dilocox.data.leases import Claim, Leases
from p2p_dilocox.data.shards import Batches
from p2p_dilocox.data.text import source_files
from p2p_dilocox.data.tokens import Corpus, load_tokens, unigram_loss

__all__ = ["Batches", "Claim", "Corpus", "Leases", "load_tokens", "source_files", "unigram_loss"]
