"use strict";
/* Show a `Job` (model.js), with events that come from the launcher or, in a report, from the document.

   1. The browser never interprets a part of an event as HTML or as a style. This file sets text only through
      `textContent`, and numbers only as attributes of SVG elements. (`test_hostile_events_are_shown_as_text`.)

   2. The page is drawn at most twice a second, and not while it is hidden. Rows and buttons that stay are changed and
      not replaced, so that they keep the keyboard focus. */

const DRAW_MS = 500, LANE_S = 600, MOST_ROWS = 200, MANY_ROWS = 12;
const SVG = "http://www.w3.org/2000/svg";
const STATES = {
  computing: "computing", reducing: "reducing", waiting: "waiting", data: "loading data", checkpoint: "checkpoint",
  compiling: "compiling", joining: "starting", late: "keeps others waiting", failed: "failed", unknown: "unknown",
};
const KINDS = { // the kinds of events that the user can filter
  Failures: ["worker_failed", "failure_seen", "step_undone", "host_lost", "hosts_disconnected"],
  Changes: [
    "resize_requested", "resize_rejected", "version_prepared", "version_committed", "resized", "worker_joined",
    "worker_draining", "worker_removed", "host_joined", "host_draining", "host_left",
  ],
  Stalls: ["stall_began", "stall_ended", "step_delayed", "runtime_message"],
  Workers: ["worker_started", "worker_registered", "worker_exited", "compiled"],
  Training: ["checkpoint_written", "checkpoint_failed", "resumed", "evaluated", "policy_decided"],
  Job: [],
};
const KIND_OF = new Map(Object.entries(KINDS).flatMap(([kind, names]) => names.map((name) => [name, kind])));

const byId = (id) => document.getElementById(id);
const dark = new Map(); // element -> the content that was set last, so that only changes touch the document

// ---- elements ----

function text(element, value) {
  value = String(value);
  if (element.textContent !== value) element.textContent = value;
}

function make(name, classes, ...children) {
  const element = document.createElement(name);
  if (classes) element.className = classes;
  element.append(...children.filter((child) => child !== null));
  return element;
}

function draw(name, attributes, content) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (content !== undefined) element.textContent = content;
  return element;
}

// ---- words ----

/** Return a duration as 0:05, 12:34 or 1:02:03. */
function clock(seconds) {
  const total = Math.max(0, Math.floor(seconds)), pad = (value) => String(value).padStart(2, "0");
  const [hours, minutes] = [Math.floor(total / 3600), Math.floor(total / 60) % 60];
  return hours ? `${hours}:${pad(minutes)}:${pad(total % 60)}` : `${minutes}:${pad(total % 60)}`;
}

const grouped = (value) => value.toLocaleString("en-US");

function short(value) {
  if (value == null || value === "") return "–";
  if (typeof value !== "number") return String(value);
  if (value >= 1e5 && value < 1e15) return grouped(Math.round(value));
  return Math.abs(value) >= 1000 && value < 1e15 ? grouped(Math.round(value)) : general(value, 4);
}

function bytes(value) {
  if (value == null) return "–";
  return value >= 2 ** 30 ? `${(value / 2 ** 30).toFixed(1)} GiB` : `${Math.round(value / 2 ** 20)} MiB`;
}

function duration(seconds) {
  if (seconds == null) return "–";
  return seconds < 1 ? `${general(seconds * 1000, 3)} ms` : spell(seconds);
}

const stateOf = (name) => (name in STATES ? name : "unknown");
const classOf = (state) => ({ late: "late-lane", joining: "unknown" })[state] ?? state;
const swatch = (state) => make("span", `swatch ${classOf(state)}`);

/** Return an event's own fields as text. */
function fields(event) {
  const shown = [];
  for (const [name, value] of Object.entries(event)) {
    if (["event", "time", "host", "rank", "step", "reason"].includes(name) || value === null || value === "") continue;
    shown.push(`${name.replaceAll("_", " ")} ${Array.isArray(value) ? value.join(", ") : value}`);
  }
  return [event.reason, shown.join(" · ")].filter(Boolean).join(" · ");
}

// ---- the view ----

class View {
  constructor(job, isLive) {
    this.job = job;
    this.isLive = isLive;
    this.token = null;
    this.connected = !isLive;
    this.hasHeard = !isLive; // whether the launcher has sent a message
    this.lostAt = null;
    this.span = 0;
    this.kinds = new Set(Object.keys(KINDS));
    this.rows = MOST_ROWS;
    this.ranks = new Map(); // rank -> its row
    this.charts = CHARTS.map((chart) => new Chart(chart));
    this.timer = null;
    this.drawnAt = 0;
    byId("charts").append(...this.charts.map((chart) => chart.element));
    this.lanes = new Lanes(byId("lanes"));
    this.filters();
    for (const input of document.querySelectorAll("#span input")) {
      input.addEventListener("change", () => { this.span = Number(input.value); this.draw(); });
    }
    document.addEventListener("visibilitychange", () => this.changed());
    new ResizeObserver(() => this.changed()).observe(byId("main"));
  }

  filters() {
    for (const kind of Object.keys(KINDS)) {
      const input = make("input");
      input.type = "checkbox";
      input.checked = true;
      input.addEventListener("change", () => {
        this.kinds[input.checked ? "add" : "delete"](kind);
        this.drawEvents();
      });
      byId("kinds").append(make("label", "", input, make("span", "", kind)));
    }
    byId("search").addEventListener("input", () => this.drawEvents());
    byId("rank").addEventListener("change", () => this.drawEvents());
    byId("more").addEventListener("click", () => { this.rows += MOST_ROWS; this.drawEvents(); });
  }

  /** Draw soon, unless a drawing is already scheduled. */
  changed() {
    if (this.timer !== null || document.hidden) return;
    const wait = Math.max(0, this.drawnAt + DRAW_MS - performance.now());
    this.timer = setTimeout(() => { this.timer = null; this.draw(); }, wait);
  }

  draw() {
    const job = this.job, account = job.account;
    byId("main").classList.toggle("blank", !this.hasHeard); // first, because charts measure their width
    this.situation = situation(job);
    if (!this.isLive && !account.ended) this.situation = { tone: "wait", text: "The log ends before the end of the job.", rank: null };
    const name = job.name ? `Job ${job.name}` : "Job";
    text(byId("job"), name);
    document.title = `${account.workers === null ? "" : `${counted(account.workers, "worker")} · `}${name} · KungFu`;
    this.drawHead();
    this.drawTiles();
    this.drawRanks();
    this.lanes.draw(job, this.isLive);
    const from = this.span ? Math.max(job.first, job.last - this.span) : job.first;
    for (const chart of this.charts) chart.draw(job, from, Math.max(job.last, from + 1));
    this.drawLists();
    this.drawEvents();
    text(byId("foot"), job.command ? `Each worker runs: ${job.command}` : "");
    this.drawnAt = performance.now();
  }

  drawHead() {
    const { account, now } = this.job, { tone, text: sentence } = this.situation;
    let state = now?.status?.state ?? (account.began ? "running" : "starting");
    if (!this.hasHeard) state = "";
    else if (account.ended) state = `exit code ${account.ended.exit_code}`;
    else if (!this.isLive) state = "not ended";
    text(byId("state"), state);
    const isWell = state === "running" && tone !== "bad";
    byId("state").dataset.tone = account.ended ? (hasFailed(account.ended) ? "bad" : "good") : isWell ? "good" : "wait";
    const isOff = this.isLive && !this.connected && !account.ended, isLost = isOff && this.lostAt !== null;
    const lost = isLost ? `not connected for ${clock((Date.now() - this.lostAt) / 1000)}` : "connecting";
    const off = isLost ? "The page has no connection to the launcher. It tries again." : "The page connects to the launcher.";
    text(byId("connection"), !this.isLive ? "report" : isOff ? lost : account.ended ? "" : "live");
    byId("situation").dataset.tone = isOff ? "wait" : tone;
    text(byId("sentence"), isOff ? off : sentence);
    text(byId("detail"), isLost && this.hasHeard ? `Last known: ${sentence}` : isOff ? "" : this.detail());
    const spoken = (isLost ? "no connection" : isOff ? "connecting" : sentence).replace(/, for [^,]* now\.$/, "."); // without the seconds
    if (spoken !== this.spoken) text(byId("spoken"), (this.spoken = spoken));
    byId("actions").hidden = !this.mayAct();
    byId("resize").hidden = !this.job.follows;
  }

  mayAct() { return this.isLive && this.token !== null && this.job.account.ended === null; }

  /** Return a second line: while the job runs, its newest failure or change. */
  detail() {
    const { account, now } = this.job;
    if (account.ended) return "";
    if (this.done && performance.now() < this.done.until) return this.done.text;
    const late = now?.ranks?.find((each) => each.rank === this.situation.rank);
    const where = late ? [late.host, late.pid && `pid ${late.pid}`, late.step && `step ${late.step}`].filter(Boolean).join(", ") : "";
    const operation = late && now.ranks.find((each) => each.waits_for?.includes(late.rank))?.operation;
    if (where) return `Rank ${late.rank}: ${where}.${operation ? ` The others wait in ${operation}.` : ""}`;
    const chapters = this.job.story.chapters().filter((each) => ["failure", "resize", "host"].includes(each.kind));
    const newest = chapters[chapters.length - 1], age = newest && this.job.last - this.job.story.first - newest.at_s;
    return newest && age < 120 ? `${clock(age)} ago: ${newest.text}` : "";
  }

  drawTiles() {
    const { account } = this.job, pace = this.isLive && !account.ended ? this.job.pace() : null;
    const seconds = account.ended ? account.seconds : Math.max(0, this.job.last - this.job.first);
    const mean = account.seconds ? account.samples / account.seconds : 0;
    const samples = pace ? pace.samples : mean, steps = pace ? pace.steps : account.seconds ? account.steps / account.seconds : 0;
    const first = account.sizes.length ? account.sizes[0][1] : null;
    const tiles = [
      ["Workers", short(account.workers), account.sizes.length > 1 ? `${first} at the beginning` : ""],
      ["Step", account.steps ? grouped(account.steps) : "–", this.progress(pace)],
      account.samples
        ? ["Samples/s", short(Number(samples.toPrecision(4))), pace ? "over 10 s" : "mean"]
        : ["Steps/s", steps ? short(Number(steps.toPrecision(3))) : "–", pace ? "over 10 s" : "mean"],
      ["Loss", short(account.loss), this.job.rate == null ? "" : `learning rate ${short(this.job.rate)}`],
      ["Goodput", account.goodput === null ? "–" : percent(account.goodput), account.committed_s ? `${spell(account.committed_s)} committed` : ""],
      ["Failures", String(account.failures), account.stalls ? counted(account.stalls, "stall") : ""],
      ["Duration", clock(seconds), ""],
    ];
    const list = byId("tiles");
    while (list.children.length < tiles.length) list.append(make("div", "", make("dt"), make("dd"), make("dd", "note")));
    tiles.forEach(([name, value, note], place) => {
      const [title, shown, below] = list.children[place].children;
      text(title, name);
      text(shown, value);
      text(below, note);
    });
  }

  /** Return the progress of training and, while training runs, the remaining time. */
  progress(pace) {
    const { account, total } = this.job;
    if (!total) return account.samples ? `${grouped(account.samples)} samples` : "";
    const left = pace?.steps && total > account.steps ? `, ${clock((total - account.steps) / pace.steps)} left` : "";
    return `of ${grouped(total)}${left}`;
  }

  // ---- ranks ----

  /** Return a row of the table for each rank, from the newest activity or, if there is none, from the events. */
  rankRows() {
    const { now, account, workers, rankPoints } = this.job;
    const shares = rankPoints[rankPoints.length - 1];
    const rows = [];
    if (now?.ranks?.length && !account.ended) {
      for (const each of now.ranks) rows.push({ ...each, key: `rank ${each.rank ?? each.pid}`, isMember: each.rank != null });
    } else {
      for (const [key, each] of workers) {
        rows.push({ ...each, key, state: each.outcome ?? "running", isMember: !each.hasLeft });
      }
    }
    const stalled = new Set(this.job.stalls.filter((stall) => stall.to === null).map((stall) => stall.rank));
    for (const row of rows) {
      const rank = row.rank;
      row.isLate = !account.ended && rank != null && (stalled.has(rank) || this.situation.rank === rank);
      if (!shares || rank == null || rank >= shares.waiting.length || (!row.isMember && row.state !== "exit code 0")) continue;
      row.p50 = shares.p50[rank];
      row.shares = ["computing", "data", "checkpoint", "waiting"].map((name) => [name, shares[name][rank] ?? 0]);
      const rest = 1 - row.shares.reduce((sum, [, part]) => sum + part, 0);
      row.shares.splice(3, 0, ["reducing", shares.computing[rank] == null ? 0 : Math.max(0, rest)]);
    }
    const lateFirst = rows.length > MANY_ROWS;
    return rows.sort((one, other) => other.isMember - one.isMember || (lateFirst && other.isLate - one.isLate)
      || (one.rank ?? 1e9) - (other.rank ?? 1e9));
  }

  drawRanks() {
    const table = byId("ranks"), rows = this.rankRows();
    if (!table.tHead) {
      const names = ["Rank", "Host", "PID", "State", "Step", "Step time", "Where its time goes", "Memory", ""];
      const classes = { Host: "wide-only", PID: "wide-only", Memory: "wide-only number memory", Step: "number step wide-only", "Step time": "number wide-only" };
      const cells = names.map((name) => {
        const cell = make("th", classes[name] ?? "", name);
        cell.scope = "col";
        if (!name) cell.append(make("span", "hidden", "Actions"));
        return cell;
      });
      table.createTHead().append(make("tr", "", ...cells));
      table.createTBody();
    }
    const body = table.tBodies[0], kept = new Set(rows.map((row) => row.key));
    for (const [key, row] of this.ranks) if (!kept.has(key)) { row.remove(); this.ranks.delete(key); }
    const hosts = new Set(rows.map((row) => row.host));
    text(byId("ranks-note"), rows.length ? `${counted(rows.length, "worker")} on ${counted(hosts.size, "host")}` : "No worker has started yet.");
    table.classList.toggle("no-steps", rows.every((row) => row.step == null));
    table.classList.toggle("no-memory", rows.every((row) => row.memory == null));
    rows.forEach((row, place) => {
      let element = this.ranks.get(row.key);
      if (!element) this.ranks.set(row.key, (element = this.rankRow()));
      if (body.children[place] !== element) body.insertBefore(element, body.children[place] ?? null);
      this.fillRank(element, row);
    });
    const select = byId("rank"), known = Math.max(0, ...this.job.account.sizes.map(([, size]) => size));
    while (select.options.length <= known) {
      const option = make("option", "", String(select.options.length - 1));
      select.append(option);
    }
  }

  rankRow() {
    const evict = make("button", "small", "Evict…");
    evict.type = "button";
    const scope = make("th");
    scope.scope = "row";
    const shares = draw("svg", { class: "shares", viewBox: "0 0 120 10", preserveAspectRatio: "none", role: "img" });
    const row = make("tr", "", scope, make("td", "wide-only text"), make("td", "wide-only"),
      make("td", "", make("span", "state", make("span"), make("span")), make("span", "narrow")), make("td", "number step wide-only"), make("td", "number wide-only"),
      make("td", "", shares), make("td", "wide-only number memory"), make("td", "act", evict));
    evict.addEventListener("click", () => this.askEvict({ ...row.dataset }));
    return row;
  }

  fillRank(row, each) {
    const [scope, host, pid, state, step, time, shares, memory, act] = row.children;
    row.className = each.isLate && this.situation.tone === "bad" ? "late" : each.isMember ? "" : "over";
    // The dialog evicts the worker of the clicked row, even if ranks shift in the meantime.
    for (const name of ["rank", "peer", "host", "pid"]) row.dataset[name] = each[name] ?? "";
    text(scope, each.rank ?? "–");
    text(state.children[1], [each.host, each.pid && `pid ${each.pid}`, each.memory && bytes(each.memory), each.step && `step ${grouped(each.step)}`].filter(Boolean).join(" · "));
    text(host, each.host ?? "–");
    text(pid, each.pid ?? "–");
    const isStuck = each.isLate && this.situation.tone === "bad", known = isStuck ? "late" : stateOf(each.state);
    const [mark, words] = state.firstChild.children;
    mark.className = `swatch ${classOf(known)}`;
    const waits = each.waits_for?.length ? ` for ${told(each.waits_for)}` : "";
    const seconds = each.seconds >= 1 ? `, ${spell(Math.round(each.seconds))}` : "";
    const stated = stateOf(each.state) === "unknown" ? each.state || "unknown" : STATES[each.state];
    const adds = each.operation && !waits && !["data", "checkpoint", "compilation"].includes(each.operation);
    const does = !adds ? stated : each.state === "unknown" ? each.operation : `${stated}: ${each.operation}`;
    text(words, `${does}${waits}${seconds}`);
    text(step, each.step == null ? "–" : grouped(each.step));
    text(time, each.p50 == null ? "–" : duration(each.p50));
    text(memory, bytes(each.memory));
    act.firstChild.hidden = !(this.mayAct() && this.job.follows && each.isMember);
    act.firstChild.setAttribute("aria-label", `Evict rank ${each.rank}…`);
    const svg = shares.firstChild, key = JSON.stringify(each.shares ?? null);
    if (svg.dataset.key === key) return;
    svg.dataset.key = key;
    svg.replaceChildren();
    svg.setAttribute("aria-hidden", String(!each.shares));
    svg.classList.toggle("hidden", !each.shares);
    if (!each.shares) return;
    let x = 0;
    for (const [name, part] of each.shares) {
      svg.append(draw("rect", { x, y: 0, width: Math.max(0, part * 120), height: 10, class: name }));
      x += part * 120;
    }
    const spoken = each.shares.filter(([, part]) => part >= 0.005).map(([name, part]) => `${STATES[name]} ${percent(part)}`).join(", ");
    svg.setAttribute("aria-label", spoken);
    svg.append(draw("title", {}, spoken));
  }

  // ---- lists ----

  drawLists() {
    const { job } = this, first = job.story.first ?? job.first;
    fill(byId("changes"), [...job.sizes].reverse().slice(0, MOST_ROWS), (each) => {
      const before = each.before == null ? "" : `${each.before} → `, step = each.step == null ? "" : `, after step ${grouped(each.step)}`;
      return ["", clock(each.time - first), `${before}${counted(each.workers, "worker")}${step}`, each.reason];
    }, "The job has not started.");
    fill(byId("story"), [...job.story.chapters()].reverse().slice(0, MOST_ROWS), (each) => {
      const cost = each.cost_s ? `cost ${spell(each.cost_s)}` : "";
      return [each.kind, clock(each.at_s), [each.kind, cost].filter(Boolean).join(" · "), each.text];
    }, "Nothing has happened yet.");
  }

  drawEvents() {
    const wanted = byId("search").value.trim().toLowerCase(), rank = byId("rank").value;
    const events = this.job.events, first = this.job.story.first ?? 0, found = [];
    let count = 0;
    for (let place = events.length - 1; place >= 0; place -= 1) {
      const event = events[place];
      if (!this.kinds.has(KIND_OF.get(event.event) ?? "Job")) continue;
      if (rank !== "" && event.rank !== Number(rank)) continue;
      if (wanted && !JSON.stringify(event).toLowerCase().includes(wanted)) continue;
      count += 1;
      if (found.length < this.rows) found.push(event);
    }
    const key = [count, this.rows, wanted, rank, [...this.kinds], events.length, events[events.length - 1]?.time].join();
    if (this.eventsKey === key) return;
    this.eventsKey = key;
    const table = byId("events");
    if (!table.tHead) {
      table.createTHead().append(make("tr", "", ...["Time", "Event", "Rank", "Step", "Details"].map((name) => {
        const cell = make("th", name === "Rank" || name === "Step" ? "number" : "", name);
        cell.scope = "col";
        return cell;
      })));
      table.createTBody();
    }
    table.tBodies[0].replaceChildren(...found.map((event) => {
      const time = make("td", "time", clock((event.time ?? first) - first));
      if (event.time) time.title = new Date(event.time * 1000).toLocaleString();
      const host = event.host ? `${event.host}: ` : "";
      return make("tr", "", time, make("td", "", event.event.replaceAll("_", " ")), make("td", "number", String(event.rank ?? "")),
        make("td", "number", event.step == null ? "" : grouped(event.step)), make("td", "text", host + fields(event)));
    }));
    table.hidden = !count;
    byId("no-events").hidden = count > 0;
    text(byId("no-events"), events.length ? "No event matches the filters." : "No event yet.");
    text(byId("events-note"), `${grouped(count)} of ${grouped(events.length)}`);
    byId("more").hidden = count <= this.rows;
  }

  // ---- actions ----

  actions() {
    const workers = byId("dialog-workers"), ok = byId("dialog-ok");
    byId("resize").addEventListener("click", () => {
      workers.value = this.job.account.workers ?? 1;
      this.ask("Resize the job", "Workers join or leave after a step. Training continues.", "Resize", false, () => {
        const size = Number(workers.value);
        if (!Number.isInteger(size) || size < 1) return "Enter a number of workers, at least 1.";
        return ["resize", { workers: size }, `The launcher has requested ${counted(size, "worker")}.`];
      });
    });
    byId("stop").addEventListener("click", () => this.ask(
      "Stop the job", "The workers finish their step and write a checkpoint if they can. Then the job ends for good.", "Stop the job", true,
      () => ["stop", {}, "The job is stopping."],
    ));
    byId("dialog-cancel").addEventListener("click", () => byId("dialog").close());
    ok.addEventListener("click", () => this.send());
    workers.addEventListener("keydown", (event) => { if (event.key === "Enter") this.send(); });
  }

  askEvict({ rank, peer, host, pid }) {
    const who = pid ? ` It runs on ${host} as process ${pid}.` : "";
    this.ask(`Evict rank ${rank}`, `The worker leaves after its step, and the others continue without it.${who}`, `Evict rank ${rank}`, true,
      () => ["evict", { rank: Number(rank), ...(peer && { peer }) }, `Rank ${rank} leaves after its step.`]);
  }

  ask(title, explanation, verb, isDanger, request) {
    text(byId("dialog-title"), title);
    text(byId("dialog-text"), explanation);
    text(byId("dialog-error"), "");
    byId("dialog-field").hidden = verb !== "Resize";
    text(byId("dialog-ok"), verb);
    byId("dialog-ok").className = isDanger ? "primary danger" : "primary";
    this.request = request;
    byId("dialog").showModal();
    (verb === "Resize" ? byId("dialog-workers") : byId("dialog-cancel")).focus();
  }

  async send() {
    const ok = byId("dialog-ok"), error = byId("dialog-error"), asked = this.request();
    if (ok.disabled) return;
    if (typeof asked === "string") { text(error, asked); return; }
    const [path, body, done] = asked;
    ok.disabled = true;
    try {
      const answer = await fetch(path, {
        method: "POST", body: JSON.stringify(body),
        headers: { "Authorization": `Bearer ${this.token}`, "Content-Type": "application/json" },
      });
      if (answer.status === 202) {
        byId("dialog").close();
        const said = await answer.json().then((found) => found.message, () => null);
        this.done = { text: said ? capital(`${said}.`) : done, until: performance.now() + 10000 };
        text(byId("spoken"), this.done.text);
        this.changed();
      } else if (answer.status === 401) {
        text(error, "The launcher doesn't accept the token. Open the URL that it has printed.");
      } else {
        const why = await answer.json().then((found) => found.error, () => null);
        text(error, why || `The launcher answered ${answer.status}.`);
      }
    } catch {
      text(error, "The launcher doesn't answer.");
    } finally {
      ok.disabled = false;
    }
  }
}

/** Show `items` in a list. `words(item)` returns the item's class, time, heading and text. */
function fill(list, items, words, ifEmpty) {
  const rows = items.map(words), key = JSON.stringify(rows);
  if (list.dataset.count === String(rows.length) && dark.get(list) === key) return;
  dark.set(list, key);
  list.dataset.count = rows.length;
  if (!rows.length) { list.replaceChildren(make("li", "empty", ifEmpty)); return; }
  list.replaceChildren(...rows.map(([kind, time, heading, body]) =>
    make("li", kind in STORY_KINDS ? kind : "", make("time", "", time), make("div", "", make("p", "tag", heading), make("p", "", body)))));
}
const STORY_KINDS = { failure: 1, stall: 1 };

// ---- charts ----

/** Each chart: `lines` returns lists of [time, value]; `marks` returns [time, value, text, kind]. */
const CHARTS = [
  {
    id: "workers", title: "Workers", isStep: true, fromZero: true, empty: "No worker has started yet.",
    points: (job) => [...job.sizes.map((each) => [each.time, each.workers]), ...(job.sizes.length ? [[job.last, job.account.workers]] : [])],
    marks: (job) => [
      ...job.sizes.slice(1).map((each) => [each.time, each.workers, `${each.before} → ${each.workers}: ${each.reason}`, ""]),
      ...job.failed.map((each) => [each.time, null, `rank ${each.rank ?? "–"} ${reason(each)}`, "failure"]),
    ],
    say: (value) => counted(value, "worker"),
  },
  {
    id: "throughput", title: "Throughput", fromZero: true, isArea: true, empty: "No step has ended yet.",
    points: (job) => job.course.map((each) => [each.time, ((job.account.samples ? each.samples : each.steps) || 0) / (each.seconds || 1), each.seconds]),
    unit: (job) => (job.account.samples ? "samples/s" : "steps/s"),
  },
  {
    id: "loss", title: "Loss", empty: "The program passes no loss.",
    points: (job) => job.points.filter((each) => typeof each.loss === "number").map((each) => [each.time, each.loss]),
  },
  {
    id: "rate", title: "Learning rate", isStep: true, fromZero: true, empty: "The optimizer's learning rate isn't known.",
    points: (job) => job.points.filter((each) => each.learning_rate != null).map((each) => [each.time, each.learning_rate]),
  },
  {
    id: "goodput", title: "Goodput", fromZero: true, isArea: true, most: 1, empty: "No step has ended yet.",
    points: (job) => job.course.map((each) => [each.time, Math.min(1, (each.committed || 0) / (each.seconds || 1)), each.seconds]),
    say: percent,
  },
  {
    id: "steptime", title: "Step time", fromZero: true, empty: "No step has ended yet.",
    points: (job) => job.points.filter((each) => each.p50 != null).map((each) => [each.time, each.p50]),
    say: duration,
  },
  {
    id: "noise", title: "Gradient noise scale", isOptional: true, empty: "",
    points: (job) => job.points.filter((each) => typeof each.noise_scale === "number").map((each) => [each.time, each.noise_scale]),
    unit: () => "samples",
  },
];

const LEFT = 52, RIGHT = 10, TOP = 8, BOTTOM = 22, HEIGHT = 150;

class Chart {
  constructor(kind) {
    this.kind = kind;
    this.title = make("h3", "", kind.title);
    this.readout = make("p", "readout");
    this.svg = draw("svg", { "aria-hidden": "true", height: HEIGHT });
    this.summary = make("figcaption", "hidden");
    this.element = make("figure", "card chart", make("div", "top", this.title, this.readout), this.svg, this.summary);
    this.element.id = `chart-${kind.id}`;
    this.element.tabIndex = 0;
    this.element.setAttribute("role", "group");
    this.at = null; // the point under the cursor
    this.svg.addEventListener("pointermove", (event) => this.point(event.clientX - this.svg.getBoundingClientRect().left));
    this.svg.addEventListener("pointerleave", () => { this.at = null; this.drawCursor(); });
    this.element.addEventListener("blur", () => { this.at = null; this.drawCursor(); });
    this.element.addEventListener("keydown", (event) => {
      const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!steps || !this.points?.length) return;
      event.preventDefault();
      this.readout.setAttribute("aria-live", "polite");
      this.at = Math.min(this.points.length - 1, Math.max(0, (this.at ?? this.points.length) + steps));
      this.drawCursor();
    });
  }

  say(value) {
    if (this.kind.say) return this.kind.say(value);
    return this.unit ? `${short(value)} ${this.unit}` : short(value);
  }

  draw(job, from, to) {
    const { kind } = this, all = kind.points(job);
    this.unit = kind.unit ? kind.unit(job) : "";
    this.element.hidden = Boolean(kind.isOptional) && !all.length;
    if (this.element.hidden) return;
    this.width = Math.max(160, this.svg.clientWidth || 400);
    this.points = within(all, from, to, kind.isStep, this.width / 2);
    this.marks = kind.marks ? kind.marks(job).filter(([time]) => time >= from) : [];
    this.from = from;
    this.to = to;
    this.origin = job.first;
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${HEIGHT}`);
    if (!this.points.length) {
      // Whether `kind.empty` is the reason is known only when there are statistics.
      const empty = job.points.length || kind.id === "workers" ? kind.empty : "No step has ended yet.";
      this.svg.replaceChildren(draw("text", { x: this.width / 2, y: HEIGHT / 2, "text-anchor": "middle" }, empty));
      text(this.readout, "");
      text(this.summary, empty);
      this.element.setAttribute("aria-label", `${kind.title}: ${empty}`);
      return;
    }
    const values = this.points.map(([, value]) => value);
    let low = kind.fromZero ? 0 : Math.min(...values), high = kind.most ?? Math.max(...values);
    if (low === high) { low = kind.fromZero ? 0 : low - Math.abs(low || 1) / 2; high = high + Math.abs(high || 1) / 2; }
    const ticks = nice(low, high, kind.id === "workers");
    this.low = Math.min(low, ticks[0]);
    this.high = kind.most ?? Math.max(high, ticks[ticks.length - 1]);
    this.svg.replaceChildren(...this.axes(ticks), ...this.lines(), ...this.drawMarks(), (this.cursor = draw("g", {})));
    const [least, most] = [Math.min(...values), Math.max(...values)], newest = values[values.length - 1];
    const summary = `${this.say(newest)} at last, between ${this.say(least)} and ${this.say(most)}, from ${clock(from - job.first)} to ${clock(to - job.first)}.`;
    text(this.summary, `${summary} ${this.marks.map(([time, , words]) => `${clock(time - job.first)}: ${words}.`).slice(-20).join(" ")}`);
    this.element.setAttribute("aria-label", `${kind.title}: ${summary}`);
    this.newest = newest;
    this.drawCursor();
  }

  x(time) { return LEFT + ((time - this.from) / (this.to - this.from)) * (this.width - LEFT - RIGHT); }
  y(value) { return TOP + (1 - (value - this.low) / (this.high - this.low)) * (HEIGHT - TOP - BOTTOM); }

  axes(ticks) {
    const found = [];
    for (const value of ticks) {
      const y = this.y(value);
      found.push(draw("line", { class: value === this.low ? "axis" : "gridline", x1: LEFT, x2: this.width - RIGHT, y1: y, y2: y }));
      found.push(draw("text", { x: LEFT - 8, y: y + 4, "text-anchor": "end" }, this.kind.say === percent ? percent(value) : this.kind.say === duration ? duration(value) : short(value)));
    }
    return found.concat(timeTicks(this.from, this.to, this.origin, this.width, (time) => this.x(time), HEIGHT - 5));
  }

  lines() {
    let path = "", before = null;
    for (const [time, value, seconds] of this.points) {
      const x = this.x(time).toFixed(1), y = this.y(value).toFixed(1);
      if (this.kind.isArea) path += before === null ? `M${this.x(Math.max(this.from, time - seconds)).toFixed(1)} ${y}H${x}` : `V${y}H${x}`;
      else path += before === null ? `M${x} ${y}` : this.kind.isStep ? `H${x}V${y}` : `L${x} ${y}`;
      before = x;
    }
    const found = [draw("path", { class: "series", d: path })];
    if (this.kind.isArea) {
      const base = this.y(this.low), start = path.slice(1, path.indexOf(" "));
      found.unshift(draw("path", { class: "area", d: `${path}V${base}H${start}Z` }));
    }
    if (this.points.length === 1) found.push(draw("circle", { class: "event-mark", cx: before, cy: this.y(this.points[0][1]), r: 2.5 }));
    return found;
  }

  drawMarks() {
    return this.marks.slice(-400).map(([time, value, words, kind]) => {
      const y = this.y(value ?? this.low), x = this.x(time);
      const mark = kind === "failure"
        ? draw("path", { class: "lane-failed", d: `M${x - 4} ${y - 4}l8 8m0 -8l-8 8` })
        : draw("circle", { class: "event-mark", cx: x, cy: y, r: 3.5 });
      mark.append(draw("title", {}, `${clock(time - this.origin)} ${words}`));
      return mark;
    });
  }

  point(x) {
    if (!this.points?.length) return;
    let best = 0;
    this.points.forEach(([time], place) => { if (Math.abs(this.x(time) - x) < Math.abs(this.x(this.points[best][0]) - x)) best = place; });
    this.at = best;
    this.drawCursor();
  }

  drawCursor() {
    if (!this.points?.length) return;
    const place = this.at === null ? null : Math.min(this.at, this.points.length - 1);
    this.cursor.replaceChildren();
    if (place === null) { text(this.readout, this.say(this.newest)); return; }
    const [time, value] = this.points[place], x = this.x(time);
    this.cursor.append(draw("line", { class: "cursor", x1: x, x2: x, y1: TOP, y2: HEIGHT - BOTTOM }),
      draw("circle", { class: "event-mark", cx: x, cy: this.y(value), r: 3.5 }));
    const near = this.marks.find(([at]) => Math.abs(this.x(at) - x) < 6);
    text(this.readout, `${clock(time - this.origin)}  ${near && near[1] !== null ? near[2] : this.say(value)}`);
  }
}

/** Return at most `most` points of a period, each the mean of a part of the period. If `isStep`, return all changes. */
function within(points, from, to, isStep, most) {
  let start = 0;
  while (start < points.length && points[start][0] < from) start += 1;
  let found = points.slice(start);
  if (isStep) {
    if (start) found = [[from, points[start - 1][1]], ...found];
    return found.filter(([, value], place) => place === 0 || place === found.length - 1 || value !== found[place - 1][1]);
  }
  if (found.length <= most) return found;
  const parts = new Map();
  for (const [time, value, weight = 1] of found) {
    const part = Math.floor(((time - from) / (to - from)) * most), sums = parts.get(part) ?? [0, 0, 0];
    parts.set(part, [time, sums[1] + value * weight, sums[2] + weight]);
  }
  return [...parts.values()].filter(([, , weight]) => weight).map(([time, value, weight]) => [time, value / weight, weight]);
}

/** Return three or four round values for the axis. */
function nice(low, high, isWhole) {
  const rough = (high - low) / 3, scale = 10 ** Math.floor(Math.log10(rough || 1));
  let step = [1, 2, 2.5, 5, 10].map((each) => each * scale).find((each) => each >= rough) || 1;
  if (isWhole) step = Math.max(1, Math.ceil(step));
  const found = [];
  for (let number = Math.ceil(low / step - 1e-9); number * step <= high * (1 + 1e-9) + 1e-12; number += 1) found.push(Number((number * step).toPrecision(12)));
  return found.length ? found : [low];
}

const TIME_STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 86400];

function timeTicks(from, to, origin, width, x, y) {
  const rough = (to - from) / Math.max(2, Math.floor(width / 110));
  const step = TIME_STEPS.find((each) => each >= rough) ?? 86400 * Math.ceil(rough / 86400);
  const found = [];
  for (let at = Math.ceil((from - origin) / step) * step; origin + at <= to; at += step) {
    found.push(draw("text", { x: Math.min(x(origin + at), width - 18), y, "text-anchor": "middle" }, clock(at)));
  }
  return found;
}

// ---- lanes ----

class Lanes {
  constructor(place) {
    this.place = place;
    this.svg = draw("svg", { role: "img" });
    this.empty = make("p", "empty", "The rows appear once ranks report their steps.");
    place.append(this.svg, this.empty);
    const shown = Object.entries(STATES).filter(([state]) => state !== "failed" && state !== "unknown");
    byId("legend").append(...shown.map(([state, words]) => make("li", "", swatch(state), words)),
      make("li", "", crossed(), "failed"));
  }

  draw(job, isLive) {
    const isSampled = isLive && job.samples.length > 0;
    const to = Math.max(job.last, job.first + 1), from = isSampled || isLive ? Math.max(job.first, to - LANE_S) : job.first;
    const size = Math.max(0, ...job.sizes.map((each) => each.workers), isSampled ? job.samples[job.samples.length - 1].ranks.length : 0);
    const isKnown = size > 0 && (isSampled || job.rankPoints.length > 0 || job.stalls.length > 0 || job.points.length > 0);
    this.svg.classList.toggle("hidden", !isKnown);
    this.empty.hidden = isKnown;
    text(byId("lanes-note"), !isKnown ? "" : isLive ? `the last ${to - from < 90 ? `${Math.round(to - from)} s` : `${Math.round((to - from) / 60)} minutes`}` : "the whole run");
    if (!isKnown) return;
    const width = Math.max(200, this.place.clientWidth);
    const key = [width, size, isSampled ? job.samples[job.samples.length - 1].time : to, job.failed.length, job.stalls.length].join();
    if (key === this.key) return;
    this.key = key;
    const left = 34, row = size > 32 ? 10 : size > 12 ? 16 : 24, bar = row - (row > 12 ? 6 : 2);
    const height = size * row + 26, x = (time) => left + (Math.min(1, Math.max(0, (time - from) / (to - from)))) * (width - left - 2);
    const paths = new Map(), add = (state, begin, end, rank, top, part) => {
      if (end <= from || part <= 0 || rank >= size) return;
      const a = x(begin), w = Math.max(0.6, x(end) - a);
      const y = rank * row + (row - bar) / 2 + top * bar;
      paths.set(state, `${paths.get(state) ?? ""}M${a.toFixed(1)} ${y.toFixed(1)}h${w.toFixed(1)}v${(part * bar).toFixed(1)}h${(-w).toFixed(1)}z`);
    };
    if (isSampled) samplesInto(job, from, to, width, size, add);
    else sharesInto(job, from, size, (width - left) / 3, add);
    for (const stall of job.stalls) {
      const end = stall.to ?? to;
      if (!isSampled) for (const rank of stall.waiting) add("waiting", stall.from, end, rank, 0, 1);
      add("late", stall.from, end, stall.rank, 0, 1);
    }
    const grounds = [], sizes = job.sizes;
    sizes.forEach((each, place) => { // a rank has a lane only while the cluster contains the rank
      const begin = Math.max(from, each.time), end = sizes[place + 1]?.time ?? to;
      if (end <= from) return;
      for (let rank = 0; rank < each.workers; rank += 1) grounds.push(`M${x(begin).toFixed(1)} ${rank * row + (row - bar) / 2}H${x(end).toFixed(1)}v${bar}H${x(begin).toFixed(1)}z`);
    });
    const labels = [], every = row < 12 ? 8 : 1;
    for (let rank = 0; rank < size; rank += every) labels.push(draw("text", { x: left - 8, y: rank * row + row / 2 + 4, "text-anchor": "end" }, rank));
    const order = ["computing", "reducing", "data", "checkpoint", "compiling", "joining", "unknown", "waiting", "late"];
    const marks = job.failed.filter((each) => each.rank != null && each.time >= from).map((each) => {
      const at = x(each.time), y = each.rank * row + row / 2, r = Math.min(5, bar / 2);
      const mark = draw("path", { class: "lane-failed", d: `M${at - r} ${y - r}l${2 * r} ${2 * r}m0 ${-2 * r}l${-2 * r} ${2 * r}` });
      mark.append(draw("title", {}, `rank ${each.rank} ${reason(each)}`));
      return mark;
    });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    this.svg.setAttribute("height", height);
    this.svg.replaceChildren(draw("path", { class: "lane-ground", d: grounds.join("") }),
      ...order.filter((state) => paths.has(state)).map((state) => draw("path", { class: classOf(state), d: paths.get(state) })),
      ...marks, ...labels, ...timeTicks(from, to, job.first, width, x, height - 5));
    this.svg.setAttribute("aria-label", spokenLanes(job, size));
  }
}

function crossed() {
  const svg = draw("svg", { viewBox: "0 0 10 10", width: 10, height: 10, "aria-hidden": "true", class: "cross" });
  svg.append(draw("path", { class: "lane-failed", d: "M1 1l8 8m0 -8l-8 8" }));
  return svg;
}

/** Draw, in each column of pixels, the state that most samples in this column have. */
function samplesInto(job, from, to, width, size, add) {
  const column = Math.max((to - from) / (size > 16 ? 240 : width / 2), 1), names = Object.keys(STATES);
  const samples = job.samples.filter((each) => each.time >= from), votes = new Uint16Array(names.length);
  const places = samples.map((each) => Math.floor((each.time - from) / column));
  for (let rank = 0; rank < size; rank += 1) {
    let state = null, begin = 0, end = 0; // a state, and the time for which successive columns have this state
    for (let number = 0; number < samples.length;) {
      const place = places[number];
      let isKnown = false;
      votes.fill(0);
      for (; number < samples.length && places[number] === place; number += 1) {
        const found = samples[number].ranks[rank];
        if (!found) continue;
        votes[names.indexOf(stateOf(found[0]))] += 1;
        isKnown = true;
      }
      if (!isKnown) continue;
      const winner = names[votes.indexOf(Math.max(...votes))], at = from + place * column;
      if (winner !== state || at - end > 2.5) {
        if (state !== null) add(state, begin, end, rank, 0, 1);
        state = winner;
        begin = at;
      }
      end = at + column;
    }
    if (state !== null) add(state, begin, end, rank, 0, 1);
  }
}

/** Draw the fractions of time that the ranks have reported for each activity. */
function sharesInto(job, from, size, most, add) {
  let points = job.rankPoints.filter((each) => each.time > from);
  while (points.length > most) points = halved(points, joinedRanks).length < points.length ? pairs(points) : points.slice(-most);
  for (const each of points) {
    const begin = Math.max(each.time - each.seconds, job.trainedFrom ?? 0);
    each.waiting.forEach((waiting, rank) => {
      if (waiting == null) return;
      const parts = [["computing", each.computing[rank] ?? 0], ["data", each.data[rank] ?? 0], ["checkpoint", each.checkpoint[rank] ?? 0]];
      const rest = Math.max(0, 1 - waiting - parts.reduce((sum, [, part]) => sum + part, 0));
      let top = 0;
      for (const [state, part] of [...parts, ["reducing", rest], ["waiting", waiting]]) {
        add(state, begin, each.time, rank, top, part);
        top += part;
      }
    });
  }
}

function pairs(points) {
  const found = [];
  for (let place = 0; place < points.length; place += 2) {
    const [one, other] = [points[place], points[place + 1]];
    found.push(other && one.waiting.length === other.waiting.length ? joinedRanks(one, other) : other ?? one);
  }
  return found;
}

function spokenLanes(job, size) {
  const newest = job.rankPoints[job.rankPoints.length - 1], found = [];
  for (let rank = 0; rank < size; rank += 1) {
    const live = job.now?.ranks?.find((each) => each.rank === rank);
    if (live) found.push(`rank ${rank} ${STATES[stateOf(live.state)]}`);
    else if (newest?.waiting[rank] != null) found.push(`rank ${rank} waits for ${percent(newest.waiting[rank])} of its time`);
  }
  const stalls = job.stalls.map((stall) => `${told(stall.waiting)} waited for rank ${stall.rank}`).slice(-10);
  return `A row for each rank. ${[...found, ...stalls].join("; ")}.`;
}

// ---- the source of the events ----

function takeToken() {
  const found = new URLSearchParams(location.hash.slice(1)).get("token");
  if (found) {
    sessionStorage.setItem("kungfu-token", found);
    history.replaceState(null, "", location.pathname + location.search);
  }
  return found || sessionStorage.getItem("kungfu-token");
}

function follow(view) {
  let seen = -1;
  const source = new EventSource("events");
  const heard = () => { view.connected = view.hasHeard = true; view.lostAt = null; };
  source.addEventListener("hello", (message) => {
    const hello = JSON.parse(message.data);
    if (!hello.resumes) { // the server sends all events again, because it can't continue from the last event
      view.job = new Job(true);
      seen = -1;
    }
    view.job.name ??= hello.job;
    heard();
    view.changed();
  });
  source.addEventListener("message", (message) => {
    const id = Number(message.lastEventId);
    if (id <= seen) return;
    seen = id;
    view.job.feed(JSON.parse(message.data));
    if (view.job.account.ended) source.close();
    view.changed();
  });
  source.addEventListener("past", (message) => { view.job.past(JSON.parse(message.data)); view.changed(); });
  source.addEventListener("now", (message) => { heard(); view.job.live(JSON.parse(message.data)); view.changed(); });
  source.addEventListener("error", () => {
    view.connected = false;
    view.lostAt ??= Date.now();
    view.changed();
  });
  setInterval(() => { if (!view.connected) view.changed(); }, 1000);
}

function start() {
  const data = byId("data"), job = new Job(data === null), view = new View(job, data === null);
  if (data === null) {
    view.token = takeToken();
    view.actions();
    follow(view);
  } else {
    for (const event of JSON.parse(data.textContent)) job.feed(event);
  }
  view.draw();
  globalThis.kungfu = view; // for the tests
}

start();
