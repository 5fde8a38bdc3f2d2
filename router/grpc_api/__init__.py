"""The gRPC frontend: `outrider.v1.Generation` and `grpc.health.v1`."""
