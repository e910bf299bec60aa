import pytest

from zerolayer.cli.environment import chosen_gpus


@pytest.mark.parametrize(
    ("environ", "chosen"),
    [
        ({}, {}),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}),
        ({"CUDA_VISIBLE_DEVICES": "2,3", "PATH": "x"}, {"CUDA_VISIBLE_DEVICES": "2,3"}),
    ],
)
def test_engines_get_the_gpus_that_the_user_chose(
    environ: dict[str, str], chosen: dict[str, str]
) -> None:
    assert chosen_gpus(environ) == chosen
