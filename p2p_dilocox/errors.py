"""Every error a user can meet. A message names the value, the limit and the way out.

DilocoxError                 exit code 1
  SpecError                  2   the run spec, or a value on the command line, is wrong
  LinkError                  2   a join link or a network address cannot be used
  UnreachableError           3   nobody answers at the addresses of the link
  NotTrustedError            4   a signature, an identity or a key file must not be trusted
  StateError                 5   a state directory or a checkpoint cannot be used
  ModelError                 6   a model that cannot be cut or loaded
  DataError                  7   data or tokenizer do not fit the run
  ClusterError               8   a rank of this cluster failed
    DriftedError             8   its parameters are not those of the other clusters
    LostError                8   it has lost track of the other clusters
  OutOfMemoryError          10   a rank of this cluster had not enough memory
"""

__all__ = [
    "ClusterError",
    "DataError",
    "DilocoxError",
    "DriftedError",
    "LinkError",
    "LostError",
    "ModelError",
    "NotTrustedError",
    "OutOfMemoryError",
    "SpecError",
    "StateError",
    "UnreachableError",
]


class DilocoxError(Exception):
    """Base of all errors meant for users; `exit_code` is what a program ends with."""

    exit_code = 1


class SpecError(DilocoxError):
    exit_code = 2


class LinkError(DilocoxError):
    exit_code = 2


class UnreachableError(DilocoxError):
    exit_code = 3


class NotTrustedError(DilocoxError):
    exit_code = 4


class StateError(DilocoxError):
    exit_code = 5


class ModelError(DilocoxError):
    exit_code = 6


class DataError(DilocoxError):
    exit_code = 7


class ClusterError(DilocoxError):
    exit_code = 8


class DriftedError(ClusterError):
    pass


class LostError(ClusterError):
    """All ranks of a cluster raise it at once: they may look where the others are, and go on from there."""


class OutOfMemoryError(DilocoxError):
    exit_code = 10
