"""Which records the DHT of a run stores: the run spec signed by
the organiser and heartbeats signed by their cluster.

hivemind's own validators let a stranger replace a dictionary by a plain value with a later expiry, and keep
records
for as long as they claim (measured, field report I11). Here every key, subkey, size and lifetime is checked.
"""

from hivemind.dht.routing import DHTID
from hivemind.dht.validation import DHTRecord, RecordValidatorBase
from hivemind.utils import MSGPackSerializer, get_dht_time

from p2p_dilocox.errors import NotTrustedError
from p2p_dilocox.swarm.keys import clusters_key, run_key
from p2p_dilocox.swarm.messages import Presence, open_sealed
from p2p_dilocox.swarm.signed import MAX_SPEC_BYTES, SignedRun

__all__ = ["PRESENCE_LIFE_S", "RUN_LIFE_S", "RunRecords"]

PRESENCE_LIFE_S = 30.0
RUN_LIFE_S = 600.0
_CLOCK_SLACK_S = 10.0
_MAX_PRESENCE_BYTES = 256 * 1024
_NO_SUBKEY = MSGPackSerializer.dumps(None)  # how hivemind marks a plain value


class RunRecords(RecordValidatorBase):
    """Refuses every record that is not part of the run. Used by
    all nodes, so a bad record does not spread."""

    def __init__(self, run_id: str, organiser: bytes) -> None:
        self._run_id = run_id
        self._organiser = organiser
        self._run_key = DHTID.generate(source=run_key(run_id)).to_bytes()
        self._clusters_key = DHTID.generate(source=clusters_key(run_id)).to_bytes()

    def validate(self, record: DHTRecord) -> bool:
        life_s = record.expiration_time - get_dht_time()
        try:
            if record.key == self._run_key:
                return (
                    record.subkey == _NO_SUBKEY
                    and life_s < RUN_LIFE_S + _CLOCK_SLACK_S
                    and self._is_run(record.value)
                )
            if record.key == self._clusters_key:
                return life_s < PRESENCE_LIFE_S + _CLOCK_SLACK_S and self._is_presence(record)
        except (NotTrustedError, ValueError, TypeError):
            return False
        return False

    def _is_run(self, value: bytes) -> bool:
        if len(value) > MAX_SPEC_BYTES + 1024:
            return False
        signed = SignedRun.from_bytes(MSGPackSerializer.loads(value))
        signed.verify(self._organiser)
        return signed.run_id == self._run_id

    def _is_presence(self, record: DHTRecord) -> bool:
        if record.subkey == _NO_SUBKEY or len(record.value) > _MAX_PRESENCE_BYTES:
            return False
        presence = open_sealed(MSGPackSerializer.loads(record.value), self._run_id, Presence)
        return bool(MSGPackSerializer.loads(record.subkey) == presence.cluster_id)
