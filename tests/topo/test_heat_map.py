"""Matrices of links: their numbers, their shades, and how they are drawn."""

from dataclasses import replace
from pathlib import Path

from PIL import Image
from rich.console import Console

from unisono.topo.facts import host_facts
from unisono.topo.heat_map import Links, describe, matrices, page, save_picture, show_rate, table
from unisono.topo.links import LinkCost

LINKS: Links = {
    "a": {"b": LinkCost(1e-4, 8e-9), "<c>": "10.0.0.3 port 7: timed out"},
    "b": {"a": LinkCost(1e-2, 8e-8), "<c>": LinkCost(1e-3, 8e-9)},
    "<c>": {"a": LinkCost(1e-3, 8e-9)},
}
NAMES = ["a", "b", "<c>"]


def test_numbers_and_shades() -> None:
    latency, bandwidth = matrices(NAMES, LINKS)
    assert latency.texts == [["·", "100 µs", "✗"], ["10 ms", "·", "1 ms"], ["1 ms", "✗", "·"]]
    assert bandwidth.texts == [["·", "1 Gbit/s", "✗"], ["100 Mbit/s", "·", "1 Gbit/s"], ["1 Gbit/s", "✗", "·"]]
    shades = [[round(each, 3) if each is not None else None for each in row] for row in latency.shades]
    assert shades == [[None, 0.0, None], [1.0, None, 0.5], [0.5, None, None]]


def test_links_that_are_nearly_alike_look_alike() -> None:
    (latency, _) = matrices(["a", "b"], {"a": {"b": LinkCost(1e-3, 1e-9)}, "b": {"a": LinkCost(1.02e-3, 1e-9)}})
    assert max(each or 0.0 for row in latency.shades for each in row) < 0.05


def test_rates() -> None:
    assert [show_rate(8 / bits) for bits in (9.41e8, 9.999e8, 4e11)] == ["941 Mbit/s", "1 Gbit/s", "400 Gbit/s"]


def test_the_terminal_shows_rows_of_senders() -> None:
    console = Console(width=60, color_system="truecolor", force_terminal=True)
    with console.capture() as shown:
        console.print(table(matrices(NAMES, LINKS)[0]))
    assert "48;2;11;61;145m  100 µs" in shown.get()  # the best
    assert "48;2;194;51;77m" in shown.get()  # no link
    plain = Console(width=60, color_system=None)
    with plain.capture() as shown:
        plain.print(table(matrices(NAMES, LINKS)[0]))
    assert shown.get().splitlines()[2].split() == ["a", "·", "100", "µs", "✗"]


def test_the_page_and_the_picture(tmp_path: Path) -> None:
    hosts = [replace(host_facts("localhost"), hostname=name, gpu_links="GPU0 <X>" * (name == "b")) for name in NAMES]
    names = {host.key: host.hostname for host in hosts}
    text = page(hosts, names, matrices(NAMES, LINKS))
    assert "<c>" not in text
    assert "&lt;c&gt;" in text
    assert "<pre>GPU0 &lt;X&gt;</pre>" in text
    assert '<td style="background:#0b3d91;color:#ffffff">100 µs</td>' in text
    assert text.count("<td") == 18
    save_picture(tmp_path / "topo.png", hosts, matrices(NAMES, LINKS))
    with Image.open(tmp_path / "topo.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    assert {(0x0B, 0x3D, 0x91), (0xC2, 0x33, 0x4D)} <= colours


def test_a_host_is_described() -> None:
    host = replace(host_facts("localhost"), quota=1.5, memory=1 << 34, memory_limit=1 << 30, gpus=("0, H200",))
    words = dict(describe(host))
    assert words["cores"].endswith(", of which its container gets 1.5")
    assert words["memory"] == "16 GiB, limited to 1 GiB"
    assert words["GPU"] == "0, H200"
