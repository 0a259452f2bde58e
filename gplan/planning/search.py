"""Cheapest paths through a ladder's candidates, with at most so many buckets and at most so much weight.

Nodes are candidates in ascending order; a path goes up through some of them and ends at the last. This module knows
costs and weights alone; `buckets` says what they mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

ALMOST = 1 + 1e-9
"""Costs and weights closer than this are the same: sums differ by their order."""

BEAM, MAX_LABELS = 200, 100_000
"""Partial paths of one length that are extended: in a first pass that only looks for a good path, so that the bound
excludes more, and in the second, which is exact unless it meets more than this."""


@dataclass(frozen=True, slots=True, eq=False)
class Graph:
    """Attributes:
    arcs: [m + 1, m] cost of going to node j from node i - 1, or from the start for i = 0; infinite where i > j.
    weights: [m] of each node, above 0 or 0.
    """

    arcs: FloatArray
    weights: FloatArray

    def priced(self, price: float) -> Graph:
        """The same with weight added to cost at a price."""
        return Graph(self.arcs + price * self.weights, self.weights)


@dataclass(frozen=True, slots=True)
class Path:
    """A path, ascending. `bound`: no path within the limits costs less. `exact`: neither does this one, to rounding."""

    nodes: tuple[int, ...]
    cost: float
    weight: float
    bound: float
    exact: bool


def cheapest_path(graph: Graph, max_nodes: int) -> Path:
    """The cheapest path of at most `max_nodes` nodes; of equally cheap ones, one with the fewest."""
    forward = _forward(graph, max_nodes)
    return _path(graph, _trace(forward, graph))


def cheapest_path_within(graph: Graph, max_nodes: int, budget: float) -> Path:
    """The same among paths of weight at most `budget`; the last node alone must be one.

    A price on weight gives a bound from below and a path from above (Handler and Zang's relaxation of the constrained
    shortest path); partial paths that the bound does not exclude, and that none of equal length and end beats in both
    cost and weight, are then extended until none is left.
    """
    limit = budget * ALMOST
    price, best = _best_price(graph, max_nodes, limit)
    bound = min(best.cost, _bound(graph, max_nodes, price, limit))
    if best.cost <= bound * ALMOST:
        return Path(best.nodes, best.cost, best.weight, bound, exact=True)
    for width in (BEAM, MAX_LABELS):
        best, complete = _search(graph, max_nodes, limit, price, best, width)
        if complete:
            break
    return Path(best.nodes, best.cost, best.weight, best.cost if complete else bound, exact=complete)


# The programme without weights --------------------------------------------------------------------------------------


def _forward(graph: Graph, max_nodes: int) -> FloatArray:
    """[k, m]: entry (k, j) is the cheapest way to node j over exactly k + 1 nodes."""
    m = len(graph.weights)
    layers = [graph.arcs[0]]
    while len(layers) < min(max_nodes, m):
        layers.append((layers[-1][:, None] + graph.arcs[1:]).min(axis=0))
    return np.array(layers)


def _backward(graph: Graph, max_nodes: int) -> FloatArray:
    """[k, m]: entry (k, j) is the cheapest way from node j to the last over at most k more nodes."""
    m = len(graph.weights)
    layer = np.full(m, np.inf)
    layer[-1] = 0.0
    layers = [layer]
    while len(layers) < min(max_nodes, m):
        layers.append(np.minimum(layers[0], (graph.arcs[1:] + layers[-1][None, :]).min(axis=1)))
    return np.array(layers)


def _trace(forward: FloatArray, graph: Graph) -> tuple[int, ...]:
    """The path behind the cheapest entry of the last node; the shortest of those that cost the same."""
    ends = forward[:, -1]
    length = int(np.argmax(ends <= ends.min() + abs(ends.min()) * (ALMOST - 1)))
    nodes = [len(graph.weights) - 1]
    for layer in range(length - 1, -1, -1):
        nodes.append(int(np.argmin(forward[layer] + graph.arcs[1:, nodes[-1]])))
    return tuple(reversed(nodes))


def _path(graph: Graph, nodes: tuple[int, ...]) -> Path:
    froms = [0, *(node + 1 for node in nodes[:-1])]
    cost = float(graph.arcs[froms, list(nodes)].sum())
    return Path(nodes, cost, float(graph.weights[list(nodes)].sum()), bound=cost, exact=True)


# The search within a weight -----------------------------------------------------------------------------------------


def _best_price(graph: Graph, max_nodes: int, limit: float) -> tuple[float, Path]:
    """The price on weight that gives the highest bound, and the cheapest path within the limit met on the way."""
    over = cheapest_path(graph, max_nodes)
    within = _path(graph, (len(graph.weights) - 1,))
    best, price = within, 0.0
    while over.weight > within.weight:
        price = (within.cost - over.cost) / (over.weight - within.weight)
        met = _path(graph, cheapest_path(graph.priced(price), max_nodes).nodes)
        value = over.cost + price * over.weight
        if met.cost + price * met.weight >= value - abs(value) * (ALMOST - 1):
            break
        if met.weight <= limit:
            within = met
            best = met if met.cost < best.cost else best
        else:
            over = met
    return max(price, 0.0), best


def _bound(graph: Graph, max_nodes: int, price: float, limit: float) -> float:
    priced = cheapest_path(graph.priced(price), max_nodes)
    return priced.cost - price * limit


@dataclass(frozen=True, slots=True, eq=False)
class _Labels:
    """Partial paths of one length: where each ends, what it costs and weighs, and which shorter one it extends."""

    node: IntArray
    cost: FloatArray
    weight: FloatArray
    parent: IntArray

    def take(self, index: IntArray) -> _Labels:
        return _Labels(self.node[index], self.cost[index], self.weight[index], self.parent[index])


def _search(graph: Graph, max_nodes: int, limit: float, price: float, best: Path, width: int) -> tuple[Path, bool]:
    """The cheapest path within the limit, `best` if none is cheaper; and whether nothing was left out. Of partial paths
    of one length, the `width` most promising are extended."""
    m = len(graph.weights)
    rest = _backward(graph.priced(price), max_nodes)
    layers = [_Labels(np.full(1, -1), np.zeros(1), np.zeros(1), np.full(1, -1))]
    complete = True
    for length in range(1, min(max_nodes, m) + 1):
        labels = _extend(graph, layers[-1], limit, price, rest[-length], best.cost / ALMOST)
        ends = np.flatnonzero(labels.node == m - 1)
        if len(ends):
            best = _path(graph, _unwind([*layers, labels], int(ends[np.argmin(labels.cost[ends])])))
        if len(labels.node) > width:
            promise = labels.cost + price * labels.weight + rest[-length][labels.node]
            labels = labels.take(np.argpartition(promise, width)[:width])
            complete = False
        if not len(labels.node):
            break
        layers.append(labels)
    return best, complete


def _extend(graph: Graph, labels: _Labels, limit: float, price: float, rest: FloatArray, ceiling: float) -> _Labels:
    """All one-node extensions that may still end cheaper than `ceiling` within the limit. `rest`: [m] the least priced
    cost from each node to the end."""
    last = len(graph.weights) - 1
    kept: list[tuple[IntArray, FloatArray, FloatArray, IntArray]] = []
    for node in _hopeful_nodes(graph, labels, limit, price, rest, ceiling):
        froms = np.flatnonzero(labels.node < node)
        weight = labels.weight[froms] + graph.weights[node]
        cost = labels.cost[froms] + graph.arcs[labels.node[froms] + 1, node]
        to_go = graph.weights[last] if node < last else 0.0
        hopeful = (weight + to_go <= limit) & (cost < ceiling)
        hopeful &= cost + price * (weight - limit) + rest[node] < ceiling
        if hopeful.any():
            froms, cost, weight = froms[hopeful], cost[hopeful], weight[hopeful]
            front = _undominated(cost, weight)
            kept.append((np.full(len(front), node), cost[front], weight[front], froms[front]))
    if not kept:
        return labels.take(np.zeros(0, np.int64))
    return _Labels(*(np.concatenate(part) for part in zip(*kept, strict=True)))


def _hopeful_nodes(
    graph: Graph, labels: _Labels, limit: float, price: float, rest: FloatArray, ceiling: float
) -> IntArray:
    """Nodes that some label can be extended to without being excluded by the bound."""
    priced = np.full(len(graph.weights) + 1, np.inf)
    np.minimum.at(priced, labels.node + 1, labels.cost + price * labels.weight)
    into = (priced[:, None] + graph.arcs).min(axis=0) + price * graph.weights
    return np.flatnonzero(into - price * limit + rest < ceiling)


def _undominated(cost: FloatArray, weight: FloatArray) -> IntArray:
    """Those than which none is both as cheap and as light."""
    order = np.lexsort((cost, weight))
    cheapest_so_far = np.minimum.accumulate(np.concatenate([[np.inf], cost[order]]))[:-1]
    return order[cost[order] < cheapest_so_far]


def _unwind(layers: list[_Labels], label: int) -> tuple[int, ...]:
    """The nodes of a label of the last layer; the first layer is the empty path."""
    nodes = []
    for labels in reversed(layers[1:]):
        nodes.append(int(labels.node[label]))
        label = int(labels.parent[label])
    return tuple(reversed(nodes))
