"""Define the rules and values that the controller and the agents share: pure functions, data classes, interfaces."""
