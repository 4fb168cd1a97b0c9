"""The documentation's site: it builds without a warning, has every public name, and its search answers a new user."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from tests.conftest import one_at_a_time

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sphinx = pytest.importorskip("sphinx", reason="the extra `docs` isn't installed")

from tests.examples.site_search import Site  # noqa: E402

SPHINX_9 = pytest.mark.skipif(sphinx.version_info < (9,), reason="older ones cut words and order results in other ways")

# What a new user types, and the page that answers it.
QUESTIONS = {
    "how do I resume": "change-a-program",
    "what does exit status 137 mean": "troubleshooting",
    "how do I keep the batch": "change-a-program",
    "why is the plugin refused to load": "troubleshooting",
    "how do I see who joined": "troubleshooting",
    "install": "start",
    "change an existing program": "change-a-program",
    "msrun": "from-msrun",
    "horovod": "from-horovod-and-torchrun",
    "schedule size steps kungfu": "from-kungfu",
    "two workers are hardly faster than one": "troubleshooting",
    "collective times out": "troubleshooting",
    "cluster does not grow": "troubleshooting",
    "resize a running job": "start",
    "several machines": "start",
    "how do I run on two machines": "start",
    "several hosts": "hosts",
    "what happens when a machine dies": "troubleshooting",
    "how do I pass the secret": "hosts",
    "which optimizer": "optimizers",
    "learning rate with more workers": "elastic-training",
    "environment variables": "environment",
    "every flag": "flags",
    "DivergenceError": "errors",
    "same bits on any number of workers": "shards",
    "write a checkpoint": "change-a-program",
    "prometheus": "metrics",
    "secret": "promises",
    "add a collective": "contributing",
    "etcd": "config-server",
    "slurm": "slurm",
    "kubernetes": "kubernetes",
    "preemption": "resizing",
    "how do I encrypt the traffic": "tls",
    "docker": "start",
    "how do I upgrade mindspore": "releasing",
    "which mindspore versions": "releasing",
    "run an msrun program unchanged": "from-msrun",
    "how do I debug a hang": "troubleshooting",
    "overlap": "overlap",
    "gradient noise scale": "monitoring",
    # In other words than the pages': not all of them are on one page.
    "custom training loop": "loops",
    "set random seed reproducible results": "shards",
    "reproducible": "shards",
    "model.fit validation": "elastic-training",
    "continue training after power failure": "change-a-program",
    "power outage": "troubleshooting",
    "spot instance preemption SIGTERM": "resizing",
    "progress of job status json": "launcher",
    "ssh passwordless multiple nodes": "hosts",
    "GeneratorDataset custom data": "data",
    "log directory": "output",
    "prometheus metrics grafana": "dashboard",
    "share file system nfs checkpoint": "checkpoints",
    "pip install wheel not supported on this platform": "troubleshooting",
    "uninstall": "start",
    "tensorboard": "monitoring",
    "jupyter notebook": "limits",
    "windows subsystem linux": "limits",
    "run on two machines": "start",
    "run on several machines": "start",
    "which mindspore versions are supported": "limits",
    "supported versions": "limits",
    "does it work with python 3.13": "limits",
    "python version": "limits",
    "does it run on gpu": "devices",
    "ascend npu support": "devices",
    "windows or mac": "limits",
    "KungFu schedule format": "from-kungfu",
    "log files of each worker": "output",
    "custom loop": "change-a-program",
    "custom optimizer": "optimizers",
    "how to call from C++": "cpp",
    "cancel job": "launcher",
    "monitor progress": "output",
    "early stopping": "elastic-training",
    "how long does a resize take": "performance",
    "validation loss": "elastic-training",
    "network bandwidth needed": "performance",
    "change number of workers at runtime": "start",
    "memory usage": "troubleshooting",
    "how to cite": "index",
    "ElasticDataset": "data",
    "worker crashes": "troubleshooting",
    "batch norm": "state",
    "save model": "elastic-training",
    "安装": "start.zh",
    "job hangs forever": "troubleshooting",
    "is it safe to kill the head node": "recovery",
    "why was my worker removed": "recovery",
    "what is lost when a worker fails": "recovery",
    "split brain network partition": "recovery",
    "how many workers can a job have": "resizing",
    "how do I write my own policy": "policies",
    "how do I audit samples": "ledger",
    "random numbers after a resize": "state",
    "how do I test my job under failures": "chaos",
    "glossary": "style",
}


@pytest.fixture(scope="module")
def html(tmp_path_factory):
    """The site, as docs/build.sh makes it; .ci/run has built it and says where."""
    if "KUNGFU_SITE" in os.environ:
        return Path(os.environ["KUNGFU_SITE"])
    folder = tmp_path_factory.mktemp("site") / "html"
    with one_at_a_time("site"):
        done = subprocess.run([str(DOCS / "build.sh"), str(folder)], env=own_python(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    return folder


def own_python(**more):
    return {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}", **more}


@pytest.fixture(scope="module")
def site(html):
    return Site(html)


def answered(site, question):
    found = site.ranked(question)
    return found[0].page if found else None


@pytest.mark.site
@SPHINX_9
def test_search_for_new_users_questions_names_the_answering_page_first(site):
    assert len(QUESTIONS) >= 80
    wrong = {
        q: [f"{f.page} ({f.score}, {f.title})" for f in site.ranked(q)[:3]]
        for q in QUESTIONS
        if answered(site, q) != QUESTIONS[q]
    }
    assert wrong == {}


@pytest.mark.site
@SPHINX_9
@pytest.mark.skipif(shutil.which("node") is None, reason="no node, to run Sphinx's own search")
def test_the_ranking_is_that_of_the_sites_own_search(html, site):
    script = r"""
const fs = require("fs"), vm = require("vm"), [html, questions] = [process.argv[2], JSON.parse(process.argv[3])];
const read = (name) => fs.readFileSync(`${html}/${name}`, "utf8");
const element = {children: [], lastChild: null, classList: {add() {}}, setAttribute() {}, addEventListener() {}};
const sandbox = {console, document: {getElementById: () => null, addEventListener() {}, documentElement: {dataset: {}}},
  SPHINX_HIGHLIGHT_ENABLED: false, localStorage: {setItem() {}},
  _ready: () => {}, _: (text) => text, DOCUMENTATION_OPTIONS: {}};
sandbox.window = sandbox;
sandbox.addEventListener = () => {};
vm.createContext(sandbox);
const page = read("search.html").replace(/<!--.*?-->/gs, "");
const scripts = [...page.matchAll(/<script[^>]* src="(_static\/[^"?]+)/g)].map((found) => found[1]);
for (const name of ["searchtools", "language_data"])
  if (!scripts.includes(`_static/${name}.js`)) throw new Error(`${name} isn't on the page of the search: ${scripts}`);
for (const name of scripts.filter((name) => /searchtools|language_data/.test(name)))
  vm.runInContext(read(name), sandbox, {filename: name});
vm.runInContext("Search.setIndex = (index) => { Search._index = index; }; var S = Search;", sandbox);
vm.runInContext(read("searchindex.js"), sandbox);
const answers = questions.map((question) => {
  sandbox.question = question;
  const results = vm.runInContext("S._performSearch(...S._parseQuery(question))", sandbox);
  return results.reverse().map((r) => [r[0], r[1], r[4]]);
});
console.log(JSON.stringify(answers));
"""
    done = subprocess.run(
        ["node", "-", str(html), json.dumps(list(QUESTIONS))], input=script, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for question, theirs in zip(QUESTIONS, json.loads(done.stdout)):
        ours = site.ranked(question)
        assert theirs, question
        assert (ours[0].page, ours[0].title, ours[0].score) == tuple(theirs[0]), question
        assert sorted(map(tuple, theirs)) == sorted((found.page, found.title, found.score) for found in ours), question


@pytest.mark.site
def test_every_public_name_is_on_a_page_of_the_api(html):
    inventory = (html / "objects.inv").read_bytes()
    listing = zlib.decompress(inventory[inventory.index(b"zlib.\n") + 6 :]).decode()
    present = {line.split()[0] for line in listing.splitlines() if " py:" in line}
    extension = surface_extension()
    names = extension.public_names(extension.LISTED.read_text())
    assert set(names) == {"ms_kungfu", *(f"ms_kungfu.{page.stem}" for page in (DOCS / "api").glob("*.md"))} - {
        "ms_kungfu.index",
        "ms_kungfu.ms_kungfu",
    }
    assert [
        f"{module}.{name}" for module, own in names.items() for name in own if f"{module}.{name}" not in present
    ] == []
    members = [
        f"{module}.{name}.{member}"
        for module, own in names.items()
        for name, public in own.items()
        for member in public.members
    ]
    assert len(members) >= 250
    assert [name for name in members if name not in present] == []


def surface_extension():
    spec = importlib.util.spec_from_file_location("public_surface", DOCS / "_ext" / "public_surface.py")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_pictures_are_what_their_program_draws():
    spec = importlib.util.spec_from_file_location("draw", DOCS / "pictures" / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.drawn()
    assert {path.name for path in (DOCS / "pictures").glob("*.svg")} == set(drawn)
    assert [name for name, text in drawn.items() if (DOCS / "pictures" / name).read_text() != text] == [], "run draw.py"


def test_every_page_is_in_the_list_that_a_code_host_shows():
    listed = (DOCS / "README.md").read_text(encoding="utf-8")
    own = {"README.md", "index.md", "changelog.md", "contributing.md", "cpp.md"}
    assert [page.name for page in DOCS.glob("*.md") if page.name not in own and f"]({page.name})" not in listed] == []


@pytest.mark.site
def test_every_entry_of_the_index_leads_to_a_place_of_its_page(site, html):
    """Which search and index link to: Sphinx drops the anchor of an entry that stands before a comment."""
    pages = {name: (html / f"{name}.html").read_text(encoding="utf-8") for name in site.names}
    entries = [
        (entry, site.names[page], anchor)
        for entry, places in site.index["indexentries"].items()
        for page, anchor, is_main in places
        if is_main
    ]
    assert len(entries) >= 50
    assert [each for each in entries if f'id="{each[2]}"' not in pages[each[1]]] == []


@pytest.mark.long
def test_a_warning_ends_the_build(tmp_path):
    copy = tmp_path / "checkout"
    shutil.copytree(DOCS, copy / "docs", ignore=shutil.ignore_patterns("_build"))
    for path in ROOT.iterdir():
        if path.name not in ("docs", ".git"):
            (copy / path.name).symlink_to(path)
    page = copy / "docs" / "limits.md"
    page.write_text(page.read_text().replace("(from-msrun.md)", "(from-msrun.md#nowhere)"))
    done = subprocess.run(
        [str(copy / "docs" / "build.sh"), str(tmp_path / "html")], env=own_python(), capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "nowhere" in done.stdout + done.stderr


@pytest.mark.long
def test_the_api_is_there_without_mindspore(tmp_path):
    """MindSpore's names are stand-ins then, and the pages have the same names."""
    (tmp_path / "sitecustomize.py").write_text(
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "def hidden(name, path=None, target=None):\n"
        "    return None if name.partition('.')[0] == 'mindspore' else find(name, path, target)\n"
        "PathFinder.find_spec = hidden\n"
    )
    folder, path = (
        tmp_path / "html",
        os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep),
    )
    done = subprocess.run(
        [str(DOCS / "build.sh"), str(folder)], env=own_python(PYTHONPATH=path), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    test_every_public_name_is_on_a_page_of_the_api(folder)


def test_the_pages_of_the_site_say_nothing_in_a_code_hosts_way(html):
    """No link leads out of the site to a file that isn't there."""
    broken = []
    for page in html.rglob("*.html"):
        if "_modules" in page.parts or "_sources" in page.parts:
            continue
        for target in re.findall(r'(?:href|src)="([^"#]+)', page.read_text(encoding="utf-8")):
            if "://" not in target and not target.startswith(("mailto:", "data:")):
                if not (page.parent / target.partition("?")[0]).exists():
                    broken.append(f"{page.relative_to(html)}: {target}")
    assert broken == []
