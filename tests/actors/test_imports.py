"""Modules that the processes of a deployment must not load."""

import subprocess
import sys

CHECK = """
import importlib, sys
for module in ("actors.pair.pair", "cluster.app", "cluster.local.one_process", "cluster.cli.__main__"):
    importlib.import_module(module)
    if heavy := {"torch", "transformers"} & sys.modules.keys():
        sys.exit(f"{module} loads {heavy}")
"""


def test_shell_and_builder_do_not_load_torch():
    """Loading torch would cost each of the two processes seconds to start and 300 MB to keep.

    A server without Ray sets the variables of torch's threads first.
    """
    assert subprocess.run([sys.executable, "-c", CHECK], check=False).returncode == 0


TARGET = """
import sys
from actors.process.actor_thread import quick_imports, without_compiler
with quick_imports():
    import actors.target.target_process
import torch
from transformers import AutoModelForCausalLM, LlamaConfig
with without_compiler(), torch.device("meta"):
    AutoModelForCausalLM.from_config(LlamaConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=2))
heavy = {"torch._dynamo.symbolic_convert", "torch._inductor", "torch.distributed.tensor", "triton"}
if heavy := heavy & sys.modules.keys():
    sys.exit(f"the target loads {heavy}")
from torch._dynamo.utils import counters
if not callable(torch._dynamo.optimize) or not torch.distributed.is_available():
    sys.exit("what is used later is not there")
"""


def test_a_target_does_not_load_torch_s_compiler_until_it_is_used():
    """Decorators in transformers would load it, and sharded tensors: half of the import's time, and 150 MB."""
    assert subprocess.run([sys.executable, "-c", TARGET], check=False).returncode == 0


COMMAND = """
import sys
from cluster.cli.__main__ import main
assert main(["cache"]) == 0
if others := {"cluster.cli.commands.serve", "cluster.cli.commands.audit", "openai"} & sys.modules.keys():
    sys.exit(f"`outrider cache` loads {others}")
"""


def test_a_command_loads_no_other_command():
    assert subprocess.run([sys.executable, "-c", COMMAND], check=False).returncode == 0
