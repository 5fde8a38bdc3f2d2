"""A prefill replica's stream of replies to a `FetchOrder`.

    FetchAccepted, then any number of (ChunkHeader, its blocks), then FetchEnd          or one FetchEnd alone

The messages are the engine's own (`engine.remote_prefill.kv_transfer`). Blocks that the replica has sent stay valid
until the reader ends the stream.

Blocks are separate replies, not references inside one: Ray may free an object that a streamed reply refers to before
the reader has it (ray-project/ray pull request 58082), but never the reply itself.
"""

from __future__ import annotations

import numpy as np

from actors.kv_transfer.direct_blocks import DirectBlocks
from engine.remote_prefill.kv_transfer import ChunkHeader, FetchAccepted, FetchEnd

BlocksReply = np.ndarray | DirectBlocks  # [n, bytes per block] uint8, or a reference to them
PrefillReply = FetchAccepted | ChunkHeader | BlocksReply | FetchEnd
