"""An audit of any OpenAI-compatible server from outside.

`client` sends requests within a budget, `evidence` weighs draws against the distributions that the server reports,
`answers`, `positions` and `sampling` are the checks, `trial` reaches a verdict, `audit` runs all checks and corrects
for their number.

Each check is a test by betting (arXiv:2210.01948): under a server that does as it reports, the evidence
of a check is a martingale that starts at 1, so it reaches 1 / alpha with probability alpha at most, however often it
is read. A fault is found as soon as the evidence suffices. A check without a finding goes on until a fault of the
stated size would have been found with the stated power.
"""
