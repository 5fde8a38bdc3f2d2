"""What every process of a pair needs: its thread, its sockets, its log."""
