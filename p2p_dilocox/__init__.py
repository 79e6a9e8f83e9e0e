"""p2p_dilocox: clusters joined only by the Internet train one language model together.

The method is DiLoCoX (arXiv 2506.21263). Start reading at trainer.py; `dilocox-peer` lies in peers/,
`dilocox-bootstrap` in bootstrap/. This file imports nothing,
so that a command's --help need not wait for torch.
"""

__all__ = ["__version__"]

__version__ = "0.1.0"
