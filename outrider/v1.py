"""The gRPC stubs of `outrider.v1`, for clients: messages in `outrider_pb2`, `GenerationStub` in `outrider_pb2_grpc`."""

from protos import outrider_pb2 as outrider_pb2
from protos import outrider_pb2_grpc as outrider_pb2_grpc
