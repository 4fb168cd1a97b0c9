"use strict";
/* Derive what the live page and the report show from a job's events. No function in this file uses the document.

   `Account` corresponds to launcher/state/account.py, and `Story` to launcher/state/story.py. tests/browser compares
   the results event by event. There is one difference: Python looks ahead in the list of events, but here a chapter
   waits for the events that complete it, because the job may still run. */

// ---- words ----

const counted = (number, thing) => `${number} ${thing}${number === 1 ? "" : "s"}`;
const capital = (text) => text.slice(0, 1).toUpperCase() + text.slice(1);

/** Return a list of ranks as text, e.g. "rank 1", "ranks 1 and 2" or "ranks 0 and 2 to 63". */
function told(ranks) {
  const runs = [];
  for (const rank of ranks) {
    const run = runs[runs.length - 1];
    if (run && rank === run[run.length - 1] + 1) run.push(rank);
    else runs.push([rank]);
  }
  const names = runs.flatMap((run) => (run.length > 3 ? [`${run[0]} to ${run[run.length - 1]}`] : run));
  const others = names.length > 1 ? `${names.slice(0, -1).join(", ")} and ` : "";
  return `${ranks.length === 1 ? "rank" : "ranks"} ${others}${names[names.length - 1]}`;
}

/** Round half to even, as Python does. */
function whole(value) {
  const floor = Math.floor(value), rest = value - floor;
  return rest > 0.5 || (rest === 0.5 && floor % 2) ? floor + 1 : floor;
}
const percent = (share) => `${whole(share * 100)}%`;
const rounded = (value) => Number(value.toFixed(3));

/** Format as Python's `%.{digits}g` does, which rounds a half to even. */
function general(value, digits) {
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  let [mantissa, exponent] = value.toExponential(digits - 1).split("e");
  const exact = value.toExponential(99).split("e"), plain = exact[0].replace(/[-.]/g, "");
  if (/^50*$/.test(plain.slice(digits)) && plain[digits - 1] % 2 === 0) {
    mantissa = `${value < 0 ? "-" : ""}${plain[0]}.${plain.slice(1, digits)}`;
    exponent = exact[1];
  }
  if (+exponent >= -4 && +exponent < digits) return String(Number(`${mantissa}e${exponent}`));
  return `${Number(mantissa)}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
}

/** Return a duration as text, e.g. "3 min 20 s". */
function spell(seconds) {
  const text = general(seconds, 3), total = whole(seconds);
  if (Number(text) < 60) return `${text} s`;
  if (total < 3600) return `${Math.floor(total / 60)} min ${total % 60} s`;
  return `${Math.floor(total / 3600)} h ${Math.floor(total % 3600 / 60)} min`;
}

// ---- the totals ----

class Account {
  constructor() {
    Object.assign(this, {
      began: null, ended: null, last: 0, steps: 0, samples: 0, committed_s: 0, measured_s: 0, loss: null, sizes: [],
      failures: 0, stalls: 0, stalled_s: 0,
    });
  }

  add(event) {
    this.last = event.time || this.last;
    switch (event.event) {
      case "job_started": this.began = event; this.hasSize(event.workers); break;
      case "leader_changed": this.began = this.began || event; break;
      case "job_ended": this.ended = event; break;
      case "version_committed": this.hasSize(event.workers); break;
      case "worker_failed": this.failures += event.standing === "standby" ? 0 : 1; break;
      case "stall_ended": this.stalls += 1; this.stalled_s += event.seconds; break;
      case "statistics":
        this.steps = event.step || this.steps;
        this.samples += event.samples || 0;
        this.committed_s += event.committed || 0;
        this.measured_s += event.seconds;
        this.loss = event.loss ?? this.loss;
    }
  }

  hasSize(workers) {
    const newest = this.sizes[this.sizes.length - 1];
    if (!newest || newest[1] !== workers) this.sizes.push([this.last, workers]);
  }

  get workers() { return this.sizes.length ? this.sizes[this.sizes.length - 1][1] : null; }
  get seconds() { return Math.max(0, this.last - (this.began?.time ?? this.last)); }
  get goodput() {
    return this.committed_s && this.seconds ? Math.min(1, this.committed_s / this.seconds) : null;
  }
}

// ---- what happened ----

const SLOW_SHARE = 0.2, SLOW_S = 10, LONG_EVALUATION_S = 1;
const DECISIONS = {
  continue: "The job went on.",
  shrink: "The job went on without it.",
  replace: "The job went on, and a new worker replaced it.",
  fail: "This ended the job.",
  finish: "The job ended with it.",
};
const STANDINGS = { member: "", joining: ", which was joining,", leaving: ", which had left,", standby: "" };
const HOSTS = {
  host_lost: "was lost", host_left: "has left the job", host_joined: "joined the job",
  host_draining: "is leaving: its launcher got a SIGTERM",
};

class Story {
  constructor() {
    this.first = null;
    this.notes = []; // for each chapter, an object with its event and with what later events add
    this.failures = []; // notes of failures that the survivors haven't reported yet
    this.resizes = [];
    this.stalls = []; // notes whose stall has not ended
    this.stores = [];
    this.delayed = null; // the note of the last stall, which the next long step may belong to
    this.run = null; // successive rank statistics with the same slowest rank
    this.runs = [];
    this.told = null; // the chapters, until the next event
    this.isLive = false; // whether the job still runs
  }

  /** Add an event. `account`: the totals of all events, including this one. */
  add(event, account) {
    if (this.first === null && event.time != null) this.first = event.time;
    this.told = null;
    this.complete(event);
    if (event.event === "rank_statistics") this.follow(event);
    if (!(event.event in TELLERS)) return;
    if (event.event === "step_delayed" && this.delayed) {
      this.delayed.delay = event;
      this.delayed = null;
      return;
    }
    const note = { event };
    this.notes.push(note);
    switch (event.event) {
      case "job_ended": note.steps = account.steps; note.goodput = account.goodput; break;
      case "worker_failed": this.failures.push(note); break;
      case "resize_requested": this.resizes.push(note); break;
      case "store_lost": this.stores.push(note); break;
      case "stall_began": this.stalls.push(note); this.delayed = note;
    }
  }

  complete(event) {
    const kind = event.event, rank = event.rank ?? null;
    const isOver = (note) => note.end && (event.time || 0) > (note.end.time || 0);
    this.stalls = this.stalls.filter((note) => !isOver(note));
    if (kind === "failure_seen") {
      for (const note of this.failures) if ((note.event.rank ?? null) === rank) note.seen = event;
    }
    if (kind === "failure_seen" || kind === "worker_failed") {
      this.failures = this.failures.filter((note) => (note.event.rank ?? null) !== rank);
    } else if (kind === "version_committed") {
      for (const note of this.failures) note.after = event.step ?? null;
      this.failures = [];
      this.run = null; // from now on, the rank may belong to another worker
      for (const note of this.resizes) if (event.version >= note.event.version) note.committed ??= event;
    } else if (kind === "resized") {
      for (const note of this.resizes) if (event.version === note.event.version) note.resized ??= event;
    } else if (kind === "store_restored") {
      for (const note of this.stores) note.back = event;
      this.stores = [];
    } else if (kind === "store_lost") {
      for (const note of this.stores) note.isUnknown = true;
      this.stores = [];
    } else if (kind === "runtime_message") {
      for (const note of this.stalls) if (note.event.waiting.includes(rank)) note.heard ??= event;
    } else if (kind === "stall_ended") {
      for (const note of this.stalls) if ((note.event.rank ?? null) === rank) note.end ??= event;
    } else if (kind === "stall_began") { // another controller may have taken over the job
      const isSame = (note) => (note.event.rank ?? null) === rank;
      for (const note of this.stalls) if (isSame(note)) note.isUnknown = !note.end;
      this.stalls = this.stalls.filter((note) => !isSame(note));
    }
    this.resizes = this.resizes.filter((note) => !note.committed || !note.resized);
    const later = (event.time || 0) - (this.delayed?.event.time || 0);
    if (["failure_seen", "resized", "stall_began"].includes(kind)
        || (kind === "statistics" && event.steps && later > event.seconds)) this.delayed = null;
  }

  /** Add rank statistics to the sequence of successive rank statistics that have the same slowest rank. */
  follow(event) {
    const rank = slowest(event);
    if (!this.run || this.run.rank !== rank) {
      this.run = { rank, event, seconds: 0, waiting: 0, shares: 0, measured: 0, others: new Set() };
      this.runs.push(this.run);
      this.runs = this.runs.filter((run) => run === this.run || (run.rank !== null && run.seconds >= SLOW_S));
    }
    if (rank === null) return;
    const run = this.run, data = event.data[rank];
    run.seconds += event.seconds;
    run.waiting += othersWait(event, rank) * event.seconds;
    if (data != null) { run.shares += data; run.measured += 1; }
    event.waiting.forEach((part, each) => { if (part != null && each !== rank) run.others.add(each); });
  }

  /** Return the chapters, sorted by the time at which they begin. */
  chapters() {
    this.told ??= this.tell();
    return this.told;
  }

  tell() {
    const at = (event) => rounded((event.time || this.first) - this.first);
    const blank = { step: null, rank: null, cause: null, decision: null, cost_s: null, waited: [] };
    const found = [];
    for (const note of this.notes) {
      const chapter = TELLERS[note.event.event](note.event, note, at, this.isLive);
      if (chapter) found.push({ ...blank, at_s: at(note.event), ...chapter });
    }
    for (const run of this.runs) {
      if (run.rank !== null && run.seconds >= SLOW_S) found.push({ ...blank, at_s: at(run.event), ...straggler(run) });
    }
    return found.sort((one, other) => one.at_s - other.at_s);
  }
}

/** Return the rank for which the others waited; null if they spent only a small part of their time waiting. */
function slowest(event) {
  let rank = null, known = 0;
  event.waiting.forEach((part, each) => {
    if (part == null) return;
    known += 1;
    if (rank === null || part < event.waiting[rank]) rank = each;
  });
  return known >= 2 && othersWait(event, rank) >= SLOW_SHARE ? rank : null;
}

/** Return the mean fraction of time that the other ranks spent waiting. */
function othersWait(event, rank) {
  const parts = event.waiting.filter((part, each) => each !== rank && part != null);
  return parts.length ? parts.reduce((sum, part) => sum + part, 0) / parts.length : 0;
}

function straggler(run) {
  const waiting = run.waiting / run.seconds, others = [...run.others].sort((one, other) => one - other);
  const share = run.measured ? run.shares / run.measured : null;
  const isData = share !== null && share >= SLOW_SHARE;
  const why = isData ? ` It spent ${percent(share)} of its own time waiting for data.` : "";
  return {
    kind: "straggler", rank: run.rank, waited: others, cost_s: rounded(waiting * run.seconds),
    cause: isData ? `data ${percent(share)}` : null,
    text: `For ${spell(run.seconds)} rank ${run.rank} was the slowest: ${told(others)} waited for `
      + `${percent(waiting)} of the time.${why}`,
  };
}

const reason = (event) => event.reason || "";

function tellHost(event) {
  const why = reason(event) && event.event !== "host_draining" ? `: ${event.reason}` : "";
  return { kind: "host", text: `Host ${event.host} ${HOSTS[event.event]}${why}.`, cause: event.reason || null };
}

const TELLERS = {
  job_started(event) {
    const where = event.hosts.length > 1 ? ` on ${counted(event.hosts.length, "host")}` : "";
    return { kind: "job", text: `The job started with ${counted(event.workers, "worker")}${where}.` };
  },
  job_ended(event, { steps, goodput }) {
    const share = goodput === null ? "" : ` ${percent(goodput)} of its time went into committed steps.`;
    const after = steps ? ` after step ${steps}` : "";
    return {
      kind: "job", step: steps || null, cause: reason(event), decision: `exit code ${event.exit_code}`,
      text: `The job ended with exit code ${event.exit_code}${after}: ${reason(event)}.${share}`,
    };
  },
  leader_changed(event) {
    return {
      kind: "controller", cause: `${event.before} controlled it before`,
      text: `Host ${event.host} took over the job, which ${event.before} had controlled.`,
    };
  },
  leader_lost(event) {
    return {
      kind: "controller", cause: reason(event),
      text: `The controller on ${event.host} stepped down: ${reason(event)}. The next controller has its own log.`,
    };
  },
  worker_failed(event, { seen, after = null }) {
    const rank = event.rank ?? null, decision = event.decision || "continue";
    const where = event.host && !reason(event).startsWith("was on host") ? ` on ${event.host}` : "";
    const completed = event.step ?? null, step = seen ? seen.step : completed ?? after;
    let text = capital(rank === null ? "a standby" : `rank ${rank}`)
      + `${where}${STANDINGS[event.standing || "member"] ?? ""} ${reason(event)}.`;
    const longer = seen && seen.seconds ? `, which took ${spell(seen.seconds)} longer than usual` : "";
    if (seen) text += ` The others noticed it in step ${step}${longer}.`;
    else if (completed !== null) text += ` Its last step that the controller knew of was ${step}.`;
    else if (step !== null) text += ` The cluster changed after step ${step}.`;
    text += ` ${DECISIONS[decision] ?? ""}`;
    const waited = seen && seen.seconds ? seen.survivors.filter((each) => each !== rank) : [];
    if (waited.length) text += ` ${capital(told(waited))} waited.`;
    return { kind: "failure", text, step, rank, cause: reason(event), decision, cost_s: seen ? seen.seconds : null, waited };
  },
  step_undone(event) {
    return {
      kind: "failure", step: event.step ?? null, cause: reason(event), decision: "repeat",
      text: `Step ${event.step} was undone and repeated: ${reason(event)}.`,
    };
  },
  resize_requested(event, { committed, resized }, at, isLive) {
    let outcome = isLive ? "It is not adopted yet." : "It was not adopted before the log ended.", step = null;
    if (committed && committed.version > event.version) {
      outcome = `Version ${committed.version} replaced it before it was adopted.`;
    } else if (committed) {
      step = committed.step ?? null;
      outcome = `It was adopted${step === null ? "" : ` after step ${step}`}, ${spell(committed.seconds)} after the request.`;
    }
    if (resized) outcome += ` Training paused for ${spell(resized.seconds)}.`;
    const before = event.workers_before ?? "None";
    return {
      kind: "resize", step, cause: `${event.by}: ${reason(event)}`, decision: `${before} -> ${event.workers}`,
      cost_s: resized ? resized.seconds : null,
      text: `Change ${before} -> ${counted(event.workers, "worker")} (version ${event.version}): `
        + `${reason(event)}. ${outcome}`,
    };
  },
  resize_rejected(event) {
    return {
      kind: "resize", cause: reason(event), decision: "rejected",
      text: `Version ${event.version} with ${counted(event.workers, "worker")} was rejected: ${reason(event)}.`,
    };
  },
  worker_draining(event) {
    return {
      kind: "resize", rank: event.rank ?? null, cause: reason(event), decision: "shrink",
      text: `Rank ${event.rank ?? "None"} leaves after its step: ${reason(event)}.`,
    };
  },
  host_lost: tellHost,
  host_left: tellHost,
  host_joined: tellHost,
  host_draining: tellHost,
  hosts_disconnected(event) {
    const other = event.other ? `host ${event.other}` : "the other hosts";
    return { kind: "host", text: `Host ${event.host} did not reach ${other}: ${reason(event)}.`, cause: reason(event) };
  },
  store_lost(event, { back, isUnknown }, at, isLive) {
    let until = isLive ? "until now" : "until the log ended";
    if (back) until = `for ${spell(rounded(at(back) - at(event)))}`;
    else if (isUnknown) until = "for an unknown time";
    return {
      kind: "store", cause: reason(event),
      text: `The cluster store did not answer ${until}; training went on, and changes waited: ${reason(event)}.`,
    };
  },
  step_delayed(event) {
    return {
      kind: "stall", step: event.step ?? null, cause: event.reason || null, cost_s: event.seconds,
      text: `Step ${event.step} took ${spell(event.seconds)} longer than usual${event.reason ? `: ${event.reason}` : ""}.`,
    };
  },
  stall_began(event, { end, delay, heard, isUnknown }, at, isLive) {
    const waited = capital(told(event.waiting)) + (event.waiting.length === 1 ? " waits" : " wait");
    const since = event.step == null ? "" : `, whose last step is ${event.step}`;
    const why = event.reason ? ` It is ${event.reason}.` : "";
    let until = isLive ? "It has not reached the operation yet." : "It had not reached the operation when the log ended.";
    if (end) until = `That lasted for about ${whole(end.seconds)} s.`;
    else if (isUnknown) until = "The log does not contain its end.";
    const isShorter = delay && end && delay.seconds < end.seconds / 2; // the clock of a stopped rank is stopped, too
    if (delay && !isShorter) until += ` Step ${delay.step} took ${spell(delay.seconds)} longer than usual.`;
    const said = heard ? ` Rank ${heard.rank} logged: ${reason(heard)}.` : "";
    return {
      kind: "stall", at_s: rounded(at(event) - event.seconds), step: (delay ? delay.step : event.step) ?? null,
      rank: event.rank ?? null, cause: event.reason || null, cost_s: isShorter ? end.seconds : delay ? delay.seconds : null,
      waited: [...event.waiting], text: `${waited} for rank ${event.rank}${since}.${why} ${until}${said}`,
    };
  },
  checkpoint_failed(event) {
    return {
      kind: "checkpoint", step: event.step ?? null, rank: event.rank ?? null, cause: reason(event),
      text: `The checkpoint of step ${event.step} was not written, and training went on: ${reason(event)}.`,
    };
  },
  resumed(event) {
    return { kind: "checkpoint", text: `Training started from the checkpoint ${event.path}.` };
  },
  evaluated(event) {
    if (event.seconds < LONG_EVALUATION_S) return null;
    return {
      kind: "evaluation", cause: "an evaluation", cost_s: event.seconds,
      text: `An evaluation took ${spell(event.seconds)}, during which no step was trained.`,
    };
  },
  policy_decided(event) {
    return {
      kind: "policy", step: event.step ?? null, cause: reason(event), decision: event.changes,
      text: `After step ${event.step} a policy decided ${event.changes}: ${reason(event)}.`,
    };
  },
};

// ---- the job ----

const MOST_EVENTS = 20000, MOST_POINTS = 6000, MOST_SAMPLES = 900;
const SHARES = ["computing", "reduction", "waiting", "data", "checkpoint"];

/** The data about a job that the page shows. */
class Job {
  constructor(isLive = false) {
    this.account = new Account();
    this.story = new Story();
    this.story.isLive = isLive;
    this.name = null;
    this.command = "";
    this.follows = true; // whether the job follows changes from outside
    this.events = []; // the newest MOST_EVENTS events, without statistics
    this.points = []; // statistics events; if there are many, old ones are merged in pairs
    this.rankPoints = []; // rank statistics events, merged in the same way
    this.sizes = []; // {time, workers, reason, step}
    this.requests = new Map(); // version -> its resize_requested event
    this.stalls = []; // {rank, waiting, from, to, reason}
    this.failed = []; // worker_failed events
    this.workers = new Map(); // for the report: {rank, host, pid, peer, outcome, hasLeft} of each process
    this.trainedFrom = null; // when the first step began
    this.rate = null;
    this.total = null; // the last step of the current training call
    this.unsaved = null; // the checkpoint_failed event, until a checkpoint is written
    this.now = null; // the newest activity that the launcher sent
    this.samples = []; // {time, ranks: [[state, step], ...]}
  }

  feed(event) {
    if (event === null || typeof event !== "object" || typeof event.event !== "string") return;
    this.account.add(event);
    this.story.add(event, this.account);
    switch (event.event) {
      case "log_began": this.name = event.job; break;
      case "job_started":
        this.command = event.command;
        this.sizes.push({ time: event.time, workers: event.workers, reason: "the job started", step: null });
        break;
      case "resize_requested": this.requests.set(event.version, event); break;
      case "version_committed": this.resized(event); break;
      case "worker_failed": this.failed.push(event); this.outcome(event, reason(event)); break;
      case "worker_removed": this.outcome(event, "removed"); break;
      case "worker_exited": this.outcome(event, event.signal ? `ended (signal ${event.signal})` : `exit code ${event.exit_code ?? 0}`); break;
      case "worker_started":
        this.workers.set(`${event.host} ${event.pid} ${event.time}`, {
          rank: event.rank ?? null, host: event.host, pid: event.pid, peer: event.peer, started: event.time, outcome: null,
          hasLeft: false,
        });
        break;
      case "stall_began": {
        const from = event.time - event.seconds;
        this.endStall(event.rank, from); // it is still open if another controller has taken over the job
        this.stalls.push({ rank: event.rank, waiting: event.waiting, from, to: null, reason: reason(event) });
        break;
      }
      case "stall_ended": this.endStall(event.rank, event.time); break;
      case "job_ended":
        this.story.isLive = false;
        for (const stall of this.stalls) stall.to ??= event.time;
        break;
      case "checkpoint_failed": this.unsaved = event; break;
      case "checkpoint_written": this.unsaved = null; break;
      case "statistics":
        this.rate = event.learning_rate ?? this.rate;
        this.total = event.total_steps ?? this.total;
        this.trainedFrom ??= event.time - Math.min(event.seconds, event.committed ?? event.seconds);
        this.points.push({ ...event, learning_rate: this.rate });
        if (this.points.length > MOST_POINTS) this.points = halved(this.points, joined);
        if (this.account.workers === 1) this.addRanks(ofTheOnlyRank(event, this.sizes[this.sizes.length - 1]?.time));
        return;
      case "rank_statistics": this.addRanks(event); return;
    }
    this.events.push(event);
    if (this.events.length > 1.1 * MOST_EVENTS) this.events = this.events.slice(-MOST_EVENTS);
  }

  addRanks(event) {
    this.rankPoints.push(event);
    if (this.rankPoints.length * event.waiting.length > 8 * MOST_POINTS) this.rankPoints = halved(this.rankPoints, joinedRanks);
  }

  resized(event) {
    const request = this.requests.get(event.version);
    for (const version of this.requests.keys()) if (version <= event.version) this.requests.delete(version);
    this.sizes.push({
      time: event.time, workers: event.workers, step: event.step ?? null, before: event.workers_before,
      reason: request ? reason(request) : reason(event) || `version ${event.version}`,
    });
    for (const stall of this.stalls) stall.to ??= event.time; // from now on, a rank may be another worker
    this.renumber();
  }

  /** Assign the ranks of the committed version. Workers that stay keep their order, and new workers follow. */
  renumber() {
    const living = [...this.workers.values()].filter((each) => each.outcome === null && each.rank !== null);
    living.sort((one, other) => one.rank - other.rank || one.started - other.started);
    living.forEach((each, rank) => { each.rank = rank; });
  }

  endStall(rank, time) {
    for (const stall of this.stalls) if (stall.rank === rank) stall.to ??= time;
  }

  outcome(event, text) {
    let worker = null; // the peer's newest process, because another process may have had the same slot before
    for (const each of this.workers.values()) if (event.peer ? each.peer === event.peer : each.pid === event.pid) worker = each;
    if (!worker || (worker.outcome !== null && event.event === "worker_exited")) return;
    worker.outcome = text;
    worker.hasLeft = event.event !== "worker_exited"; // true if the worker failed or was removed
    worker.rank = event.rank ?? worker.rank;
    if (event.event === "worker_removed") this.renumber();
  }

  /** Store the activity of each rank, which the launcher sends once a second. */
  live(now) {
    this.now = now;
    this.follows = now.status?.follows_changes ?? this.follows;
    if (now.ranks?.length) {
      const ranks = [];
      for (const each of now.ranks) if (each.rank != null) ranks[each.rank] = [each.state, each.step];
      this.samples.push({ time: now.time, ranks });
      if (this.samples.length > MOST_SAMPLES) this.samples.splice(0, this.samples.length - MOST_SAMPLES);
    }
  }

  /** Store the samples that were taken before the page was opened. */
  past(samples) {
    const from = samples.length ? samples[0].time : Infinity;
    this.samples = [...this.samples.filter((each) => each.time < from), ...samples].slice(-MOST_SAMPLES);
  }

  get first() { return this.account.began?.time ?? this.story.first ?? this.now?.time ?? 0; }
  get last() { return Math.max(this.account.last, this.account.ended ? 0 : this.now?.time ?? 0); }

  /** Return the statistics. If the last ones are old, add an entry without steps for the time since then. */
  get course() {
    const newest = this.points[this.points.length - 1], seconds = newest ? this.last - newest.time : 0;
    if (this.account.ended || seconds <= SILENT_S) return this.points;
    return [...this.points, { time: this.last, seconds, steps: 0, samples: 0, committed: 0 }];
  }

  /** Return the samples and the steps per second in the last `seconds`; null if there are no statistics. */
  pace(seconds = 10) {
    const { course } = this;
    let samples = 0, steps = 0, covered = 0;
    for (let place = course.length - 1; place >= 0 && covered < seconds; place -= 1) {
      const point = course[place];
      samples += point.samples || 0;
      steps += point.steps || 0;
      covered += point.seconds;
    }
    return covered ? { samples: samples / covered, steps: steps / covered } : null;
  }
}

/** Merge neighbouring points in the older half, two into one. */
function halved(points, join) {
  const half = points.length >> 1, found = [];
  for (let place = 0; place < half; place += 2) {
    found.push(place + 1 < half ? join(points[place], points[place + 1]) : points[place]);
  }
  return found.concat(points.slice(half));
}

function mean(one, other, name) {
  const a = one[name], b = other[name];
  if (a == null || b == null) return a ?? b ?? null;
  if (typeof a !== "number" || typeof b !== "number") return b;
  return (a * one.seconds + b * other.seconds) / (one.seconds + other.seconds || 1);
}

function joined(one, other) {
  const found = { ...one, ...other };
  for (const name of ["seconds", "steps", "samples", "committed"]) found[name] = (one[name] || 0) + (other[name] || 0);
  for (const name of ["loss", "p50", "noise_scale", ...SHARES]) found[name] = mean(one, other, name);
  return found;
}

function joinedRanks(one, other) {
  const found = { ...other, seconds: one.seconds + other.seconds };
  for (const name of ["p50", "p99", "computing", "waiting", "data", "checkpoint"]) {
    found[name] = other[name].map((value, rank) =>
      mean({ v: one[name][rank], seconds: one.seconds }, { v: value, seconds: other.seconds }, "v"));
  }
  return found;
}

/** Return the rank statistics of a job that has had one worker since `since`. With one worker, a job logs none. */
function ofTheOnlyRank(event, since) {
  const found = { time: event.time, seconds: Math.min(event.seconds, Math.max(0, event.time - (since ?? 0))) };
  for (const name of ["p50", "p99", "computing", "waiting", "data", "checkpoint"]) found[name] = [event[name] ?? null];
  return found;
}

// ---- what the job waits for ----

const STALL_S = 2, SLOW_NOW_S = 5, SILENT_S = 3;
const DOING = {
  computing: "is computing", reducing: "is in a reduction", compiling: "is compiling", data: "is loading data",
  checkpoint: "is writing a checkpoint", evaluation: "is evaluating", compilation: "is compiling", callback: "is in a callback",
  joining: "is joining",
};

/** Return what a rank does, as text. `why`: the reason that the launcher reported when the stall began. */
function doing(rank, why) {
  if (why) return `is ${why}`;
  if (!rank) return "doesn't come to the reduction";
  const operation = rank.operation || "";
  if (rank.state === "failed") return operation ? `has failed (${operation})` : "has failed";
  if (operation === "stopped by a signal") return `is ${operation}`;
  return DOING[operation] ?? DOING[rank.state] ?? "doesn't come to the reduction";
}

/** Return {rank, ranks, seconds} of the rank for which most others wait now; null if none waits for long.

    A rank that waits itself is not the cause: the chain of waits leads to it. `rank` is null if each chain is a circle. */
function blockedNow(now, limit_s) {
  const waits = new Map(now.ranks.filter((each) => each.waits_for?.length).map((each) => [each.rank, each]));
  const found = new Map();
  for (const each of waits.values()) {
    const chain = new Set(each.waits_for); // the loop below adds elements while it iterates over the set
    for (const rank of chain) for (const next of waits.get(rank)?.waits_for ?? []) chain.add(next);
    const causes = [...chain].filter((rank) => !waits.has(rank));
    for (const cause of causes.length ? causes : [null]) {
      const group = found.get(cause) ?? { rank: cause, ranks: [], seconds: 0 };
      group.ranks.push(each.rank);
      group.seconds = Math.max(group.seconds, each.seconds ?? 0);
      found.set(cause, group);
    }
  }
  const long = [...found.values()].filter((group) => group.seconds >= limit_s);
  return long.sort((one, other) => other.ranks.length - one.ranks.length || other.seconds - one.seconds)[0] ?? null;
}

/** Return whether a rank has ended a step in the last seconds, according to the samples. */
function progresses(job) {
  const steps = (sample) => Math.max(0, ...sample.ranks.filter(Boolean).map(([, step]) => step ?? 0));
  const recent = job.samples.slice(-4);
  return recent.length > 1 && steps(recent[recent.length - 1]) > steps(recent[0]);
}

/** Return whether the job has ended with an error, and not because a user or a scheduler stopped it. */
const hasFailed = (ended) => ended.exit_code !== 0 && !reason(ended).startsWith("interrupted by SIG");

/** Return {tone, text, rank}: one sentence about what the job does now. `tone`: good, wait, bad or done. */
function situation(job) {
  const { account, now } = job, last = job.last;
  if (account.ended) {
    const chapters = job.story.chapters().filter((each) => each.kind === "job");
    const tone = hasFailed(account.ended) ? "bad" : "done";
    return { tone, text: chapters[chapters.length - 1].text, rank: null };
  }
  if (!account.began) return { tone: "wait", text: "The job is starting.", rank: null };
  const wait = (group, why, each = "") => ({
    tone: "bad", rank: group.rank,
    text: `Rank ${group.rank} ${why}: ${told(group.ranks)} ${group.ranks.length === 1 ? "waits" : "wait"} for it${each}, `
      + `for ${spell(Math.round(group.seconds))} now.`,
  });
  const open = job.stalls.filter((stall) => stall.to === null), isMoving = progresses(job);
  const group = now ? blockedNow(now, isMoving ? SLOW_NOW_S : STALL_S) : null;
  const known = group ? open.find((stall) => stall.rank === group.rank) : open[open.length - 1];
  const rank = now?.ranks.find((each) => each.rank === (group ?? known)?.rank);
  if (group && group.rank === null) {
    const ranks = capital(told(group.ranks)), seconds = spell(Math.round(group.seconds));
    return { tone: "bad", rank: group.ranks[0], text: `${ranks} wait for each other, for ${seconds} now.` };
  }
  if (group && isMoving && !known) {
    const slow = wait(group, "is slow", " in each step");
    if (rank && rank.state !== "computing" && rank.state in DOING) slow.text += ` It ${doing(rank, "")} most of the time.`;
    return { ...slow, tone: "wait" };
  }
  if (group) {
    if (known) group.seconds = Math.max(group.seconds, last - known.from);
    return wait(group, doing(rank, known?.reason));
  }
  if (known) return wait({ rank: known.rank, ranks: known.waiting, seconds: last - known.from }, doing(rank, known.reason));
  const status = now?.status;
  if (status?.state && status.state !== "running" && status.why) {
    return { tone: "wait", text: `The job is ${status.state}: ${status.why}.`, rank: null };
  }
  const run = job.story.run;
  if (run?.rank != null && run.seconds >= SLOW_S && last - (job.rankPoints[job.rankPoints.length - 1]?.time ?? 0) < 60) {
    const { waited, cause } = straggler(run), verb = waited.length === 1 ? "spends" : "spend";
    const why = cause ? ` It spends ${cause.slice(5)} of its own time waiting for data.` : "";
    return {
      tone: "wait", rank: run.rank,
      text: `Rank ${run.rank} is slow: ${told(waited)} ${verb} ${percent(run.waiting / run.seconds)} of the time waiting for it.${why}`,
    };
  }
  if (job.unsaved) {
    return { tone: "wait", rank: job.unsaved.rank ?? null, text: `Checkpoints fail: ${reason(job.unsaved)}. Training continues.` };
  }
  const newest = job.points[job.points.length - 1], workers = counted(account.workers, "worker");
  if (!newest) {
    return { tone: "good", text: `${workers} ${account.workers === 1 ? "runs" : "run"}. No step has ended yet.`, rank: null };
  }
  if (last - newest.time > 10) {
    return {
      tone: "wait", rank: null,
      text: `No step has ended for ${spell(Math.round(last - newest.time))}, and no rank waits for another one.`,
    };
  }
  const ahead = account.workers === 1 ? "trains" : "train";
  return { tone: "good", text: `${workers} ${ahead}. No rank keeps others waiting.`, rank: null };
}
