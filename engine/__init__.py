"""The numeric core: token ids in, token ids out. It knows no Ray, no asyncio and no HTTP.

Dimension letters, the same in every file:

    B  sequences in a step              L  layers
    T  tokens in a step (flat)          H  key/value heads
    R  rows whose logits are needed     G  query heads per key/value head
    K  draft tokens of one sequence     D  head dimension
    V  vocabulary                       N  blocks in the pool
                                        P  tokens per block

Inside formulas p is the target's distribution and q the draft's (arXiv:2211.17192).
"""
