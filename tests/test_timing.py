"""The timing model: its parts against arithmetic by hand, its outputs' formats, its errors against measured times."""

import json
import struct

import pytest

import reference
import submission
import vgpu
from vgpu import validate
from vgpu.timing import chips, explain, model, perfetto, plot
from vgpu.timing.record import Copy, Recorder
from vgpu.timing.simulate import Recorded, Server, Simulation
from vgpu.validation import b200


def chip(**changes) -> chips.Chip:
    """A B200 with some constants replaced."""
    constants = chips.B200.constants() | {n: chips.assumed(v, "", "test") for n, v in changes.items()}
    return chips.Chip(name="test", **constants)


def recorder(warps: list[list[tuple]], ctas: int = 1, keys=None) -> Recorder:
    """A recording of `ctas` one-CTA clusters whose warps did these events."""
    out = Recorder()
    events = (tuple(tuple(w) for w in warps),)
    out.structures[events] = 0
    for i in range(ctas):
        numbered = tuple(tuple(1000 * i + j if keys is None else keys[j] for j, e in enumerate(w) if e[1] == "copy")
                         for w in warps)
        out.clusters.append((0, (numbered,)))
    return out


def simulate(warps, on=None, ctas=1, launches=1, pdl=False, cold=True, slots=1, keys=None):
    recorded = Recorded(recorder(warps, ctas, keys), 1, slots, pdl)
    return Simulation(on or chip(), [recorded] * launches, cold).run()


def stream(copies: int, nbytes: int, stages: int) -> list[list[tuple]]:
    """A producer that keeps `stages` copies in flight, and a consumer that frees each at once."""
    producer = [(0.0, "init", (0, 8 * s), 1) for s in range(2 * stages)] + [(0.0, "named", 0, 64, True)]
    consumer = [(0.0, "named", 0, 64, True)]
    for i in range(copies):
        full, empty, phase = (0, 8 * (i % stages)), (0, 8 * (stages + i % stages)), i // stages
        producer += [(0.0, "wait", empty, phase - 1), (0.0, "expect", full, nbytes, 1),
                     (0.0, "copy", Copy(nbytes, (0,), (full,), 1))]
        consumer += [(0.0, "wait", full, phase), (0.0, "arrive", empty, 1)]
    return [producer, consumer]


def test_every_constant_says_where_it_comes_from():
    for each in chips.CHIPS.values():
        for name, constant in each.constants().items():
            assert constant.kind in ("published", "measured", "assumed"), name
            assert constant.source, name
            assert constant.value >= 0, name


def test_a_constant_of_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="kind: 'guessed'"):
        chips.Constant(1.0, "", "guessed", "")


def test_a_server_is_first_come_first_served():
    server = Server(4.0)
    assert [server.serve(0, 40), server.serve(2, 8), server.serve(100, 4)] == [10, 12, 101]
    assert server.busy == 13


def test_bytes_in_flight_over_latency_is_the_throughput():
    """Little's law: one SM, few bytes in flight; a copy's round trip decides."""
    c = chip(mbarrier_latency=0, mbarrier_issue=0, copy_issue=0, named_barrier_latency=0, named_barrier_warp=0,
             l2_latency=500, dram_latency=1000, dram_bandwidth=1e6, l2_bandwidth=1e6, sm_ingest=1e6, sm_misses=1e6)
    for stages in (1, 2, 4):
        result = simulate(stream(64, 1024, stages), c)
        trips = 64 / stages
        assert result.ends[0] - result.starts[0] == pytest.approx(trips * 1500 + c.store_drain.value, rel=0.01)


def test_many_bytes_in_flight_are_bound_by_the_port():
    c = chip(l2_latency=100, dram_latency=100)
    result = simulate(stream(256, 8192, 16), c)
    port = 256 * 8192 / (c.sm_ingest.value / c.clock.value)
    assert result.ends[0] - result.starts[0] == pytest.approx(port, rel=0.06)
    assert result.busy["SM ingest"] == pytest.approx(port)


def test_all_sms_together_are_bound_by_dram():
    result = simulate(stream(64, 16384, 8), ctas=148)
    nbytes = 148 * 64 * 16384
    assert result.bytes["DRAM"] == nbytes
    least = nbytes / chips.B200.dram_bandwidth.value * 1e-3
    assert least < result.us(result.ends[0] - result.starts[0]) < 1.15 * least


def test_shared_data_come_from_dram_once():
    result = simulate(stream(16, 4096, 4), ctas=10, keys=list(range(1000)))
    assert result.bytes["DRAM"] == 16 * 4096
    assert result.bytes["L2"] == 10 * 16 * 4096


def test_warm_data_come_from_l2_in_later_launches():
    cold = simulate(stream(16, 4096, 4), launches=3)
    warm = simulate(stream(16, 4096, 4), launches=3, cold=False)
    assert (cold.bytes["DRAM"], warm.bytes["DRAM"]) == (3 * 16 * 4096, 16 * 4096)


def test_tensor_core_runs_in_order_and_commits_after():
    """Four MMAs of 64 cycles, issued at once: the commit's barrier flips 256 cycles and the latency later."""
    bar = (0, 0)
    warp = [(0.0, "init", bar, 1)] + [(0.0, "mma", 0, 64.0)] * 4 + [(0.0, "commit", 0, (bar,)), (0.0, "wait", bar, 0)]
    c = chip(mbarrier_issue=0)
    result = simulate([warp], c)
    wait = sum(result.waits[0].values())
    assert wait == pytest.approx(256 + c.mma_latency.value + c.mbarrier_latency.value, abs=6)
    assert result.busy["tensor core"] == 256


def test_waves_follow_from_the_slots():
    body = [[(1000.0, "stg", 0, 0)]]
    one = simulate(body, ctas=148)
    two = simulate(body, ctas=149)
    many = simulate(body, ctas=149, slots=2)
    length = [r.ends[0] - r.starts[0] for r in (one, two, many)]
    assert length[1] > length[0] + 1000 > length[2] + 900


def test_dependent_launches_overlap():
    """With programmatic dependent launch the second grid's prologue runs under the first grid's tail."""
    body = [[(0.0, "pdl_launch"), (3000.0, "pdl_wait"), (500.0, "stg", 0, 0)]]
    plain, dependent = simulate(body, launches=4), simulate(body, launches=4, pdl=True, slots=4)
    period = [r.ends[-1] - r.ends[-2] for r in (plain, dependent)]
    assert period[0] > 3500 + chips.B200.launch_gap.value
    assert period[1] < period[0] - 3000


def test_a_replay_that_cannot_end_is_an_error():
    with pytest.raises(RuntimeError, match="stopped with 1 clusters unfinished"):
        simulate([[(0.0, "init", (0, 0), 1), (0.0, "wait", (0, 0), 0)]])


@pytest.fixture(scope="module")
def launch():
    """A recorded launch of the submission: 2 x 6 tiles of 64 columns, 9 k-tiles."""
    device = vgpu.device()
    device.recording = True
    try:
        submission.custom_kernel(reference.generate_input(256, 384, 2304, 1, 3, "cpu"))
    finally:
        device.recording = False
    return vgpu.last_launch()


def test_recording_counts_what_the_counters_count(launch):
    """Copies, bytes and MMAs of the recording are those of the launch."""
    recording = launch.recording
    structures = list(recording.structures)
    events = [e for index, _ in recording.clusters for cta in structures[index] for warp in cta for e in warp]
    copies = [e[2] for e in events if e[1] == "copy"]
    assert len(copies) == launch.counters["tma_load_instructions"]
    assert sum(c.nbytes for c in copies) == launch.counters["tma_load_bytes"]
    assert sum(e[3] for e in events if e[1] == "mma") == launch.counters["mma_cycles"]
    assert len(recording.structures) == 1, "equal tiles are one structure"


def test_an_unrecorded_launch_is_refused():
    submission.custom_kernel(reference.generate_input(128, 128, 256, 1, 3, "cpu"))
    with pytest.raises(ValueError, match="it was not recorded"):
        model.recorded(vgpu.last_launch(), chips.B200)


def test_breakdown(launch):
    breakdown, result = model.model([launch], chips.B200, host_us=3.0)
    nbytes = 2 * 256 * 2304 // 2  # A and B of 256 x 384 would be more: floors are checked against the counters
    assert nbytes < launch.counters["tma_load_bytes"]
    floors = breakdown.floors_us
    assert floors["host"] == 3.0
    assert floors["tensor core"] == pytest.approx(9 * 4 * (48 + 2 * 16) / 1.965e3, rel=1e-6)  # MMAs, copies of scales
    assert floors["L2 to SMs"] == pytest.approx(launch.counters["tma_load_bytes"] / 13_300e3, rel=1e-6)
    assert breakdown.call_us == max(breakdown.device_us, 3.0)
    assert max(floors.values()) <= breakdown.call_us * 1.0001
    assert set(breakdown.waits_us) == set("012345")
    slow, _ = model.model([launch], chips.B200, host_us=500.0)
    assert (slow.call_us, slow.bound) == (500.0, "host")
    assert json.loads(json.dumps(breakdown.as_dict()))["bound"] == breakdown.bound
    assert result.us(result.ends[-1]) > 0
    assert explain.explain(result, 1e9).bound == "latency"


def test_trace_is_in_chrome_format(launch, tmp_path):
    _, result = model.model([launch], chips.B200)
    perfetto.write_trace(result, tmp_path / "t.json", "case")
    trace = json.loads((tmp_path / "t.json").read_text())
    events = trace["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    named = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"CTA 0 warp 4", "CTA 0 warp 5", "CTA 0 tensor core"} <= set(named.values())
    assert all({"name", "ts", "dur", "pid", "tid"} <= set(e) and e["dur"] >= 0 and e["tid"] in named for e in spans)
    assert sum(e["name"] == "MMA" for e in spans) == 9 * 4
    assert sum(e["name"].startswith("copy tile") for e in spans) == 9 * 4
    assert "modelled" in events[0]["args"]["name"]


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_picture_is_1200_wide(launch, tmp_path, ending):
    _, result = model.model([launch], chips.B200)
    path = tmp_path / f"t.{ending}"
    plot.write_timeline(result, path, "case")
    data = path.read_bytes()
    if ending == "png":
        assert struct.unpack(">I", data[16:20])[0] == 1200
    else:
        assert b"<svg" in data
    assert len(data) > 5000


def test_errors_against_the_h200_are_those_stated():
    """Kernels marked `test` never set a constant."""
    found = validate.rows()
    assert len([r for r in found if r.role == "test"]) >= 40
    median, worst = validate.summary(found, "test")
    assert median <= min(validate.MEDIAN_ERROR, chips.H200.median_error.value)
    assert worst <= max(validate.WORST_ERROR, chips.H200.worst_error.value)


def test_errors_against_published_b200_times_are_within_the_stated_worst():
    """Both tiles on the shortest shape, which the model gets least right; `python -m vgpu.validate` has them all."""
    found = b200.rows(variants=b200.VARIANTS[:2], shapes=b200.SHAPES[2:])
    assert [r.published for r in found] == [7.81, 6.53]
    assert max(abs(r.error) for r in found) <= chips.B200.worst_error.value
    assert b200.orders(found) == (1, [])


def test_orders_names_the_pairs_that_are_wrong():
    modelled = zip(b200.VARIANTS[:2], (5.0, 6.0), strict=True)
    first, second = (b200.Row(v, b200.SHAPES[2], v.us[2], us, "") for v, us in modelled)
    assert b200.orders([first, second]) == (1, ["specialised, 128x128 and specialised, 128x64 at n, k = 7168, 2048"])


@pytest.mark.parametrize("variant", [
    b200.Variant("odd and even 64-wide tiles", "", (), 0, {"tile_n": 64, "stages": 3}),
    b200.Variant("loads ahead", "", (), 0, {"tile_n": 128, "stages": 3, "specialised": False, "ahead": 2}),
    b200.Variant("no load ahead", "", (), 0, {"tile_n": 128, "stages": 2, "specialised": False}),
    b200.Variant("split-K", "", (), 0, {"tile_n": 128, "stages": 2, "splits": 2}),
], ids=lambda v: v.name)
def test_imitations_compute_the_right_product(variant):
    """Against float64; `run` raises where C is wrong."""
    launches = b200.run(variant, (128, 256, 1024), check=True)
    assert len(launches) == variant.config.get("splits", 1)  # with two splits, the second launch sums
