/* The site's search, in the place of Sphinx's own, which finds a page only where it has every word of the question.

   A page counts by how much of the question it has: each word weighs the more the fewer pages have it, and counts twice
   where it stands in a heading or an index entry. To that comes the heading, or the entry of a line `<!-- index: -->`,
   that is most like the question. Pages for those who use ms_kungfu come before those for those who change it.
   tests/examples/site_search.py does the same in Python and reads the numbers here. Sphinx puts this text into
   language_data.js, which the page of the search loads after searchtools.js. */
const Ranking = {
  words: 10,
  heading: 15,
  entry: 30,
  phrase: 5,
  behind: {
    "api/": 3,
    "architecture": 6,
    "benchmarks/": 6,
    "changelog": 6,
    "contributing": 6,
    "control-protocol": 6,
    "events": 6,
    "messages": 6,
    "mindspore": 6,
    "recovery-protocol": 6,
    "recovery-tests": 6,
    "results": 6,
    "source-files": 6,
    "style": 6
  },

  list: (files) => (Array.isArray(files) ? files : [files]),

  /* The words that say something, as the index has them. */
  bag: (text) => {
    const [stemmer, dull] = [new Stemmer(), new Set(stopwords)];
    const kept = splitQuery(text).map((word) => word.toLowerCase()).filter((word) => !dull.has(word));
    return [...new Set(kept.map((word) => stemmer.stemWord(word)))];
  },

  /* Of the index: {word: {page: how much}}, and the phrases of each page. Once, as it takes a moment. */
  prepare: (index) => {
    if (Ranking.prepared === index) return;
    const [has, phrases] = [new Map(), []];
    const note = (word, page, much) => {
      if (!has.has(word)) has.set(word, new Map());
      has.get(word).set(page, much);
    };
    for (const [kind, much] of [["terms", 1], ["titleterms", 2]])
      for (const [word, files] of Object.entries(index[kind]))
        Ranking.list(files).forEach((page) => note(word, page, much));
    const phrase = (text, worth, page, anchor) => phrases.push([Ranking.bag(text), text, worth, page, anchor || ""]);
    for (const [title, places] of Object.entries(index.alltitles))
      places.forEach(([page, anchor]) => phrase(title, Ranking.heading, page, anchor));
    for (const [entry, places] of Object.entries(index.indexentries))
      for (const [page, anchor, isMain] of places)
        if (isMain) {
          phrase(entry, Ranking.entry, page, anchor);
          Ranking.bag(entry).forEach((word) => note(word, page, 2));
        }
    Object.assign(Ranking, { prepared: index, has, phrases });
    phrases.forEach((each) => {
      each[0] = new Map(each[0].map((word) => [word, Ranking.weight(word, index.docnames.length)]));
    });
  },

  /* {page: how much}; of a word that is nowhere, the pages that have a longer one with it. */
  places: (word) => {
    if (Ranking.has.has(word)) return Ranking.has.get(word);
    const found = new Map();
    if (word.length > 2)
      for (const [longer, pages] of Ranking.has)
        if (longer.includes(word))
          pages.forEach((much, page) => found.set(page, Math.max(found.get(page) || 0, much / 2)));
    return found;
  },

  /* 1 where most pages have it, 1 more for each halving. */
  weight: (word, pages) => {
    let [weight, having] = [1, Ranking.places(word).size || 1];
    for (; having * 2 <= pages; having *= 2) weight += 1;
    return weight;
  },

  pages: (query) => {
    const { docnames, titles, filenames } = Search._index;
    Ranking.prepare(Search._index);
    const [asked, question] = [Ranking.bag(query), query.toLowerCase().trim()];
    const weights = new Map(asked.map((word) => [word, Ranking.weight(word, docnames.length)]));
    const sum = (words) => words.reduce((total, word) => total + weights.get(word), 0);
    const whole = sum(asked);
    const [held, covered, likest] = [new Map(), new Map(), new Map()];
    for (const word of asked)
      Ranking.places(word).forEach((much, page) => {
        held.set(page, (held.get(page) || 0) + weights.get(word) * much);
        covered.set(page, (covered.get(page) || 0) + weights.get(word));
      });
    for (const [words, text, worth, page, anchor] of Ranking.phrases) {
      const common = sum(asked.filter((word) => words.has(word)));
      if (common === 0) continue;
      const own = [...words.values()].reduce((total, weight) => total + weight, 0);
      const [precision, recall] = [common / own, common / whole];
      const literal = text.toLowerCase().includes(question) && question.length >= text.length / 2;
      const score = (worth * 2 * precision * recall) / (precision + recall) + (literal ? Ranking.phrase : 0);
      if (score > (likest.get(page) || [0])[0]) likest.set(page, [score, text, worth, anchor]);
    }
    const found = [...held.keys()].map((page) => {
      const [score, text, worth, anchor] = likest.get(page) || [0, "", 0, ""];
      const total = (Ranking.words * held.get(page)) / whole + score - Ranking.less(docnames[page]);
      const under = worth === Ranking.heading && score * 2 >= worth && text !== titles[page];
      return [
        docnames[page], under ? `${titles[page]} > ${text}` : titles[page],
        anchor && score * 2 >= worth ? "#" + anchor : "", null, Math.floor(total + 0.5), filenames[page], "text", page
      ];
    });
    const best = Math.max(...found.map((each) => each[4]));
    return found
      .filter((each) => covered.get(each[7]) * 2 > whole || each[4] * 2 >= best)
      .map((each) => each.slice(0, 7));
  },

  less: (name) => Ranking.behind[Object.keys(Ranking.behind).find((start) => name.startsWith(start))] || 0,

  /* The best last, as Sphinx wants them. */
  search: (query, searchTerms, excludedTerms, highlightTerms, objectTerms) => {
    _removeChildren(document.getElementById("search-progress"));
    const objects = [...objectTerms].flatMap((term) => Search.performObjectSearch(term, objectTerms));
    objects.forEach((each) => (each[4] -= Ranking.less(each[0])));
    const seen = new Set();
    return [...objects, ...Ranking.pages(query)]
      .sort(_orderResultsByScoreThenName)
      .reverse()
      .filter((each) => !seen.has(`${each[1]} ${each[5]}${each[2]}`) && seen.add(`${each[1]} ${each[5]}${each[2]}`))
      .reverse();
  }
};
if (typeof Search !== "undefined") Search._performSearch = Ranking.search;
