"""The server side of Paceline: shards that hold the weights, and the command `psserver`."""
