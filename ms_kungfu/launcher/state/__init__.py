"""Define the rules and values that controller and agents share: pure code and interfaces."""
