from __future__ import annotations

from pathlib import Path

import pytest

from disagg.errors import RequestError
from disagg.tools.sim.trace import TraceRequest, read_trace

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "trace"
    path.write_text(text)
    return path


def test_a_mooncake_trace_is_read(tmp_path: Path) -> None:
    later = '{"timestamp": 2500, "input_length": 512, "output_length": 0, "hash_ids": [7]}\n'
    assert read_trace(written(tmp_path, later + "\n" + GOOD)) == [
        TraceRequest(0.0, 600, 5, (1, 2)),
        TraceRequest(2.5, 512, 1, (7,)),  # an answer has a token
    ]


def test_an_azure_trace_is_read_and_begins_at_0(tmp_path: Path) -> None:
    lines = "2023-11-16 18:17:03.9799600,4808,10\n2023-11-16 18:17:05.4799600,110,27\n"
    first, second = read_trace(written(tmp_path, AZURE + lines))
    assert first == TraceRequest(0.0, 4808, 10)
    assert second.arrival_s == pytest.approx(1.5) and second.num_prompt_tokens == 110


def test_an_azure_trace_of_2024_has_offsets(tmp_path: Path) -> None:
    lines = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 02:00:01+02:00,2399,6\n"
    first, second = read_trace(written(tmp_path, AZURE + lines))
    assert (first.num_prompt_tokens, first.num_output_tokens) == (2162, 5)
    assert second.arrival_s == pytest.approx(0.99007)


@pytest.mark.parametrize(
    ("text", "where", "why"),
    [
        (GOOD + '{"timestamp": 1, "inp', "line 2", "truncated"),
        (GOOD + GOOD + "\n" + '{"timestamp": 0}', "line 4", "input_length"),
        (GOOD.replace("600", "-600"), "line 1", ">= 1"),
        (GOOD.replace("600", '"600"'), "line 1", "Expected `int`"),
        (GOOD.replace("[1, 2]", "[1]").replace("600", "2000"), "line 1", "4 blocks"),
        (GOOD.replace("[1, 2]", "[1, -2]"), "line 1", "hash_ids"),
        (AZURE + "2023-11-16 18:17:03.97,4808,10\n2023-11-16 18:17:04,110\n", "line 3", "unpack"),
        (AZURE + "2023-11-16 18:17:03.97,many,10\n", "line 2", "many"),
        (AZURE + "yesterday,4808,10\n", "line 2", "yesterday"),
        (AZURE + "2023-11-16 18:17:03.97,0,10\n", "line 2", "at least one token, but has 0"),
        ("TIMESTAMP,Tokens\n", "line 1", "columns"),
    ],
)
def test_a_broken_line_is_refused_with_its_number(
    tmp_path: Path, text: str, where: str, why: str
) -> None:
    with pytest.raises(RequestError, match=where) as refusal:
        read_trace(written(tmp_path, text))
    assert why in refusal.value.message


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no requests"):
        read_trace(written(tmp_path, AZURE))
    with pytest.raises(RequestError, match="Cannot read"):
        read_trace(tmp_path / "nowhere")
