"""The stream in which a prefill replica answers a `FetchOrder`.

    FetchAccepted, then any number of (ChunkHeader, its blocks), then FetchEnd          or one FetchEnd alone

The messages are the engine's own (`engine.remote_prefill.kv_transfer`). What the replica has sent stays valid until the
reader ends the stream.

Blocks are replies of their own, not references inside one: Ray may free what a streamed reply refers to before its
reader has it (ray-project/ray pull request 58082), and never the reply itself.
"""

from __future__ import annotations

import numpy as np

from actors.kv_transfer.direct_blocks import DirectBlocks
from engine.remote_prefill.kv_transfer import ChunkHeader, FetchAccepted, FetchEnd

BlocksReply = np.ndarray | DirectBlocks  # [n, bytes per block] uint8, or where that lies
PrefillReply = FetchAccepted | ChunkHeader | BlocksReply | FetchEnd
