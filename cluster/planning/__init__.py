"""The arithmetic of a planned deployment: shapes, hardware, roofline, speed-up and capacity."""
