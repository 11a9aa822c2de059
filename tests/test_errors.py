"""The exception tree: messages that help, and the exit codes of the commands."""

from muster.errors import CheckpointError, EnvironmentLackError, InputError, MusterError, UnprovenError


def test_a_message_names_thing_found_expected_and_next_step() -> None:
    error = CheckpointError("model.safetensors", found="10 bytes", expected="20 bytes", hint="download it again")
    assert str(error) == "model.safetensors: found 10 bytes, expected 20 bytes\n  hint: download it again"


def test_an_expectation_alone_reads_well() -> None:
    assert str(MusterError("--format", expected="nvfp4")) == "--format: expected nvfp4"


def test_gather_keeps_every_reason() -> None:
    error = CheckpointError.gather("checkpoint", [CheckpointError("a"), CheckpointError("b", found="x")])
    assert isinstance(error, CheckpointError)
    assert str(error) == "checkpoint: found 2 problems\n  - a\n  - b: found x"
    assert CheckpointError.gather("checkpoint", []) is None


def test_a_hint_of_a_single_reason_stays_under_it() -> None:
    error = MusterError("all", reasons=[MusterError("a", hint="do this"), MusterError("b")])
    assert str(error) == "all\n  - a\n      hint: do this\n  - b"


def test_exit_codes() -> None:
    assert (UnprovenError.exit_code, InputError.exit_code, EnvironmentLackError.exit_code) == (1, 2, 3)
