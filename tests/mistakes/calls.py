"""Calls of check_training that are refused: (options, begin of the error)."""

WRONG_CALLS = [
    ([], "the command is missing"),
    (["--seconds", "0", "--", "true"], "--seconds and --stall must"),
    (["--json", "no/such/file", "--", "true"], "cannot write no/such/file"),
    (["--", "no_such_command"], "cannot start the command"),
    (["--judge", "no/such"], "there is no folder no/such"),
    (["--judge", "."], "no records in .: did python start there"),
    (["--judge", ".", "--", "true"], "--judge starts nothing"),
    (["--print-environment"], "--print-environment needs --records"),
    (["--records", "kept", "--stall", "3", "--", "true"], "--records judges nothing"),
    (["--records", "kept", "--", "no_such_command"], "cannot record in kept, or start"),
]
