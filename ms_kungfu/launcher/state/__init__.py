"""Rules and values that controller and agents share: pure code, or interfaces."""
