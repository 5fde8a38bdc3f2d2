"""docs/operations.md lists the keys that the schema has."""

from cluster.deploy_keys import PAGE, key_table, with_table


def test_the_page_lists_every_key_with_its_default():
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "run python -m cluster.deploy_keys"
    assert "| `cache.block_size` | `16` |" in key_table()
