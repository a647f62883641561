"""How the peers of bench/attention_peer.py and bench/backward_peer.py are timed."""
import statistics
import time

import torch


def captured(call, places, side):
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        for place in range(places):
            call(place)
    return graph.replay


def median_us(call, rounds, places=1, side=None, graph=True):
    """Microseconds of one call, the median of replays of a graph: call(0) .. call(places - 1), captured on `side`.

    graph=False: the calls themselves, launched by the host."""
    side = side or torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # twice before the capture, at least
        for place in range(max(places, 2)):
            call(place % places)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # a graph has memory of its own
    run = captured(call, places, side) if graph else lambda: [call(place) for place in range(places)]
    times = []
    time.sleep(0.5)  # the GPU cools: all begin alike
    with torch.cuda.stream(side):
        run()
        for _ in range(rounds):
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            run()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / places)
    return statistics.median(times)
