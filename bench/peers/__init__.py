"""`make bench-peers`: other servers of the same pair against this one, in one run (docs/benchmarks.md).

```
 install -> convert -> reference -> rounds of systems, one alive at a time -> rows -> docs/peers*.json, benchmarks.md
              per system: start, warm up, every number of streams, plain and with the draft, peak memory, end
```
"""
