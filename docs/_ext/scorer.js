/* How search results are ordered: Sphinx's own scores, but that a heading counts more than a word in it, and pages for
   those who use ms_kungfu come before those for those who change it. tests/examples/site_search.py reads the numbers. */
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  heading: 5,
  behind: {
    "api/": 3,
    "architecture": 6,
    "benchmarks/": 6,
    "changelog": 6,
    "contributing": 6,
    "mindspore": 6
  },
  score: (result) => {
    const [page, , , , score, , kind] = result;
    if (kind === "title") return score + Scorer.heading;
    if (kind === "index") return score;
    const known = Object.keys(Scorer.behind).find((start) => page.startsWith(start));
    return score - (known === undefined ? 0 : Scorer.behind[known]);
  }
};
