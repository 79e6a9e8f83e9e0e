"""Clusters that start from a Hugging Face checkpoint: the same one trains, two different ones do not."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.events import Evaluated, Phase
from p2p_dilocox.model_config import load_model_config
from p2p_dilocox.runspec import parse_run

from .conftest import Swarm
from .peer import Peer, run_text
from .test_training import MakeSwarm

Join = Callable[[Swarm, str], Peer]


@pytest.fixture
def join(rank_module: Any, tmp_path: Path) -> Join:
    return lambda net, name: Peer(rank_module.run_rank, rank_module.Wish, net, tmp_path, name)


def write_weights(directory: Path, seed: int, **how: Any) -> None:
    """A model whose head is zero: it takes all tokens for equally likely."""
    torch.manual_seed(seed)
    config = load_model_config(parse_run(run_text()).model)
    config.tie_word_embeddings = False
    config.attention_dropout = 0.1
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        model.get_output_embeddings().weight.zero_()
    model.save_pretrained(directory, **how)


def from_weights(directory: Path, outer_steps: int) -> str:
    head, _, rest = run_text(outer_steps=outer_steps, min_clusters=2).partition("[model.config]")
    tail = rest[rest.index("[data]") :].replace("[data]", '[data]\npacking = "documents"')
    head = head.replace("stages = 2", "stages = 4")  # two layers: embedding and head are stages without one
    return f'{head}path = "{directory}"\nstart = "weights"\n{tail}'


def test_clusters_with_the_same_weights_train_from_them(swarm: MakeSwarm, join: Join, tmp_path: Path) -> None:
    write_weights(tmp_path / "model", 1, max_shard_size="200KB")
    net = swarm(from_weights(tmp_path / "model", 2))
    peers = [join(net, name) for name in ("ada", "bee")]
    ends = [peer.finish() for peer in peers]
    assert ends[0].reason == "complete"
    assert ends[0].parameter_digests == ends[1].parameter_digests
    for peer in peers:
        losses = {e.t: e.val_loss for e in peer.events if isinstance(e, Evaluated)}
        assert losses[0] == pytest.approx(math.log(2048), rel=1e-6)
        assert losses[2] < losses[0] - 0.1


def test_clusters_with_different_weights_say_so_and_do_not_train(
    swarm: MakeSwarm, join: Join, tmp_path: Path
) -> None:
    write_weights(tmp_path / "model", 1)
    net = swarm(from_weights(tmp_path / "model", 2))
    first = join(net, "ada")
    first.until(lambda event: isinstance(event, Phase) and event.name == "waiting")
    write_weights(tmp_path / "model", 2)
    second = join(net, "bee")
    with pytest.raises(NotTrustedError, match="model.path has other weights here than on"):
        second.finish()
    first.wish.leave(now=True)
    first.thread.join(60)  # it goes on waiting, unless it looked while the other was there
    assert first.error is None or "other weights here than" in str(first.error)
    assert not first.losses() and not second.losses()
