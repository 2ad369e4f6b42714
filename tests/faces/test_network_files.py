"""Networks in files, on the command line."""

import networkx as nx
import numpy as np
import pytest
import scipy

import torchgw
from torchgw._errors import InvalidInputError
from torchgw.cli import main
from torchgw.cli._files import read_array, read_side


@pytest.fixture
def network():
    graph = nx.connected_watts_strogatz_graph(30, 4, 0.4, seed=1)
    nx.set_edge_attributes(graph, {edge: 1 + i / 4 for i, edge in enumerate(graph.edges)}, "weight")
    return graph


WRITERS = {
    "graphml": nx.write_graphml,
    "gml": nx.write_gml,
    "edgelist": nx.write_edgelist,
    "edges": nx.write_weighted_edgelist,
    "mtx": lambda graph, path: scipy.io.mmwrite(path, nx.to_scipy_sparse_array(graph)),
    "npz": lambda graph, path: scipy.sparse.save_npz(path, nx.to_scipy_sparse_array(graph)),
    "csv": lambda graph, path: nx.to_pandas_edgelist(graph).to_csv(path, index=False),
}


@pytest.mark.parametrize("form", WRITERS)
def test_networks_are_read(form, network, tmp_path):
    path = str(tmp_path / f"network.{form}")
    WRITERS[form](network, path)
    side = read_side(path)
    assert side.ids.tolist() == [str(node) for node in range(30)]
    read = nx.to_scipy_sparse_array(side.space, dtype=float)
    np.testing.assert_allclose(read.toarray(), nx.to_numpy_array(network))
    with pytest.raises(InvalidInputError, match="is a network, and numbers are expected"):
        read_array(path)


@pytest.mark.parametrize("text", ["% KONECT\n1 2\n10 2\n", "# SNAP\n1\t2\n2\t10\n", "1,2\n2,10\n"])
def test_nodes_with_numbers_are_in_their_order(text, tmp_path):
    (tmp_path / "network.edges").write_text(text)
    side = read_side(str(tmp_path / "network.edges"))
    assert side.ids.tolist() == ["1", "2", "10"]
    assert side.space.number_of_edges() == 2


def test_ends_of_edges_are_named_as_by_igraph_too(tmp_path):
    (tmp_path / "network.tsv").write_text("from\tto\tweight\na\tb\t1\nb\tc\t2\n")
    side = read_side(str(tmp_path / "network.tsv"))
    assert side.ids.tolist() == ["a", "b", "c"]
    assert side.space.edges["b", "c"]["weight"] == 2


def test_a_matrix_that_is_not_symmetric_is_a_directed_network(tmp_path):
    matrix = scipy.sparse.coo_array(([1.0, 1.0], ([0, 1], [1, 2])), shape=(3, 3))
    scipy.io.mmwrite(tmp_path / "network.mtx", matrix)
    assert read_side(str(tmp_path / "network.mtx")).space.is_directed()


def test_two_networks_are_matched(network, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    nx.write_graphml(nx.relabel_nodes(network, "node {}".format), "x.graphml")
    nx.write_weighted_edgelist(network, "y.edges")
    command = ["align", "x.graphml", "y.edges", "-o", "out.npz", "--partners", "pairs.csv"]
    assert main([*command, "--seed", "0", "-q"]) in (0, 3)
    assert (torchgw.load("out.npz").lazy_plan.argmax() == np.arange(30)).mean() > 0.9
    first = (tmp_path / "pairs.csv").read_text().splitlines()[1]
    assert first.startswith("node 0,0,")
    assert main([*command, "--distance-matrices"]) == 2
    assert "square tables, and a network is none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("n.graphml", "<x", "not a readable network"),
        ("n.gml", "graph [", "not a readable network"),
        ("n.mtx", "hello", "not a readable network"),
        ("n.edges", "1 2\n3\n", "line 2 has one node"),
        ("n.edges", "1 2 near\n", "'near'"),
        ("n.csv", "source,target,weight\na,b,1\nb,c,\n", r"row 2, column 1 \(weight\) is ''"),
    ],
)
def test_files_without_a_network_are_refused(name, text, message, tmp_path):
    (tmp_path / name).write_text(text)
    with pytest.raises(InvalidInputError, match=message):
        read_side(str(tmp_path / name))


def test_a_sparse_matrix_that_is_not_square_is_no_network(tmp_path):
    scipy.sparse.save_npz(tmp_path / "n.npz", scipy.sparse.random_array((3, 4), format="csr"))
    with pytest.raises(InvalidInputError, match="sparse and square"):
        read_side(str(tmp_path / "n.npz"))


def test_parallel_edges_are_refused(tmp_path):
    nx.write_graphml(nx.MultiGraph([(0, 1), (0, 1)]), tmp_path / "n.graphml")
    with pytest.raises(InvalidInputError, match="several edges"):
        read_side(str(tmp_path / "n.graphml"))
