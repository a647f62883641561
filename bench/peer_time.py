"""How the peers of bench/attention_peer.py and bench/backward_peer.py are timed."""
import statistics

import torch


def median_us(call, rounds, places=1, side=None):
    """Microseconds of one call, the median of replays of a graph: call(0) .. call(places - 1), captured on `side`."""
    side = side or torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # twice before the capture, at least
        for place in range(max(places, 2)):
            call(place % places)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for place in range(places):
            call(place)
    times = []
    for _ in range(rounds):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / places)
    return statistics.median(times)
