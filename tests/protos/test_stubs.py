"""The committed stubs match outrider.proto."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from protos import outrider_pb2 as pb2
from protos import outrider_pb2_grpc

ROOT = Path(pb2.__file__).parent.parent


def test_the_stubs_are_fresh(tmp_path: Path) -> None:
    """Compares descriptors, which do not depend on the version of the compiler; `make protos` writes new stubs."""
    protoc = pytest.importorskip("grpc_tools.protoc", reason="the package grpcio-tools is not installed")
    compiled = tmp_path / "descriptors"
    arguments = ["protoc", f"--proto_path={ROOT}", f"--descriptor_set_out={compiled}", "protos/outrider.proto"]
    assert protoc.main(arguments) == 0
    [described] = descriptor_pb2.FileDescriptorSet.FromString(compiled.read_bytes()).file
    committed = descriptor_pb2.FileDescriptorProto()
    pb2.DESCRIPTOR.CopyToProto(committed)
    for file in (described, committed):
        file.ClearField("source_code_info")
        for message in file.message_type:
            for field in message.field:
                field.ClearField("json_name")
            for nested in message.nested_type:
                for field in nested.field:
                    field.ClearField("json_name")
    assert committed == described


def test_every_call_has_its_stub_and_servicer() -> None:
    calls = {method.name for method in pb2.DESCRIPTOR.services_by_name["Generation"].methods}
    assert calls == {"Generate", "GenerateStream", "Tokenize", "GetModel"}
    assert calls <= set(dir(outrider_pb2_grpc.GenerationServicer))
    assert calls <= set(dir(outrider_pb2_grpc.Generation))


def test_the_stubs_import_from_the_package() -> None:
    assert sys.modules["protos.outrider_pb2"] is pb2
    assert "from protos import outrider_pb2" in Path(outrider_pb2_grpc.__file__).read_text(encoding="utf-8")
