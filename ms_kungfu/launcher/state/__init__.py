"""What both sides know and decide by: pure, or interfaces."""
