"""`make bench-peers`: what else one could serve the same pair with, against this, in one run (docs/peers.md).

```
 install -> convert -> reference -> rounds of systems, one alive at a time -> rows -> docs/peers.md, .json, .png
              per system: start, warm up, every number of streams, plain and with the draft, peak memory, end
```
"""
