"use strict";

/* Nothing that comes from the server or from a file is ever parsed as HTML: text goes into textContent only. */

const $ = (id) => document.getElementById(id);

const BASE = new URL(".", location.href).href;  // prefix of all requests: a proxy may serve the page below a path
const RATE = 24000;           // samples per second, of all models
const KEY_VARIABLE = "QWEN3_TTS_API_KEY";
const TYPING_PAUSE = 10_000;  // milliseconds without a key press that end a sentence
const IDLE_CLOSE = 20_000;    // milliseconds until an unused WebSocket is closed; the server closes it after 30 s


/* ---- Messages */

/** The server's fields whose elements have other ids, and those that messages call by other names. */
const FIELD_IDS = { input: "text", audio_sample: "file", name: "voice-name", ref_text: "transcript" };
const FIELD_WORDS = { input: "the text", audio_sample: "this file", ref_text: "the transcript" };

/** Show an error next to its field, or next to the element that was used, or at the top of the page. */
function showError(error, used) {
  clearError();
  const field = $(FIELD_IDS[error.param] ?? error.param);
  const isField = field?.matches("input, select, textarea") && !field.closest("[hidden]");
  const place = isField || used ? element("p", { id: "mistake", className: "mistake", role: "alert" }) : $("error");
  if (isField) {
    field.after(place);
    field.setAttribute("aria-invalid", "true");
    field.setAttribute("aria-errormessage", "mistake");
    field.closest("details")?.setAttribute("open", "");
    if (document.activeElement !== $("live")) {  // the user may be typing there
      field.focus();
    }
  } else {
    used?.after(place);
  }
  place.textContent = asSentence(error.message.replace(/^\w+/, (name) => FIELD_WORDS[name] ?? name));
}

function clearError() {
  $("error").textContent = "";
  const field = document.querySelector("[aria-invalid]");
  field?.removeAttribute("aria-invalid");
  field?.removeAttribute("aria-errormessage");
  $("mistake")?.remove();
}

/** An Error about a field. param: the server's name of the field */
function mistake(message, param) {
  return Object.assign(new Error(message), { param });
}

function element(tag, properties, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  made.append(...children);
  return made;
}

function showStatus(text, id = "status") {
  $(id).textContent = text;
}

/** The server's messages begin in lower case and end without a full stop. */
function asSentence(text) {
  text = text.trim();
  return text.charAt(0).toUpperCase() + text.slice(1) + (/[.!?]$/.test(text) ? "" : ".");
}


/* ---- Settings that survive a reload, unless the browser forbids storage */

const kept = {};

function remember(name, value, storage = "localStorage") {
  kept[name] = value;
  try {
    window[storage].setItem(`qwen3-tts-${name}`, value);
  } catch {}  // then it is kept until the page is closed
}

function recall(name, storage = "localStorage") {
  try {
    kept[name] ??= window[storage].getItem(`qwen3-tts-${name}`);
  } catch {}
  return kept[name] ?? "";
}


/* ---- The server */

/** The key as a string of bytes, as headers require. */
function apiKey() {
  return String.fromCharCode(...new TextEncoder().encode(recall("key", "sessionStorage")));
}

/** Like fetch, with the key. Throws an Error whose message can be shown. */
async function call(path, { headers, ...options } = {}) {
  const authorization = apiKey() ? { Authorization: `Bearer ${apiKey()}` } : {};
  const response = await fetch(BASE + path, { headers: { ...headers, ...authorization }, ...options }).catch((error) => {
    throw error.name === "AbortError" ? error : new Error("The server cannot be reached: is it running?");
  });
  $("key-form").hidden = response.status !== 401;
  if (response.ok) {
    return response;
  }
  if (response.status === 401) {
    throw mistake(apiKey() ? "The server does not know this key: check it, and enter it again" :
      "This server needs a key: enter the one that its owner gave you", "key");
  }
  const error = (await response.json().catch(() => null))?.error;
  const message = error?.message ?? `The server answered with status ${response.status}`;
  throw Object.assign(new Error(message), { status: response.status, param: error?.param });
}

/** In a browser a WebSocket cannot send an Authorization header, so the key is sent as a subprotocol. */
function openWebSocket(path) {
  const key = btoa(apiKey()).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
  return new WebSocket(BASE.replace(/^http/, "ws") + path, key ? ["speech", `bearer.${key}`] : []);
}


/* ---- Samples */

/** A WAV file of mono 16-bit samples. pieces: arrays of samples */
function wavFile(pieces) {
  const data = new Blob(pieces);
  return new Blob([
    "RIFF", Uint32Array.of(36 + data.size), "WAVE",
    "fmt ", Uint32Array.of(16),
    Uint16Array.of(1, 1),            // PCM, one channel
    Uint32Array.of(RATE, 2 * RATE),  // samples and bytes per second
    Uint16Array.of(2, 16),           // bytes and bits per sample
    "data", Uint32Array.of(data.size), data,
  ], { type: "audio/wav" });
}


/* ---- Playback: each chunk is scheduled right after the previous one when it arrives */

class Player {
  context = null;
  output = null;
  seconds = 0;  // scheduled so far
  endTime = 0;  // when the last scheduled sample ends, on the context's clock

  /** Call this from a click or key event: browsers allow sound only after one. */
  prepare() {
    this.context ??= new AudioContext({ sampleRate: RATE });  // no resampling, so no clicks between chunks
    this.gaps = 0;
    this.restart();
  }

  restart() {
    document.querySelectorAll("audio").forEach((other) => other.pause());  // one sound at a time
    this.context.resume();
    this.silence();
    this.output = this.context.createGain();
    this.output.connect(this.context.destination);
    this.lead = 0.05;  // seconds from the arrival of the first chunk until it is played
    this.endTime = this.seconds = this.heard = 0;
  }

  /** Play again from a position. samples: all that have arrived after it */
  seek(seconds, samples) {
    this.restart();
    this.add(samples);
    this.seconds += seconds;
    this.heard = seconds;
  }

  /** isAfterPause: whether the user's pause in typing may have caused a gap before it */
  add(samples, isAfterPause) {
    const buffer = this.context.createBuffer(1, samples.length, RATE);
    const channel = buffer.getChannelData(0);
    samples.forEach((sample, i) => { channel[i] = sample / 32767; });
    const source = this.context.createBufferSource();
    source.buffer = buffer;
    source.connect(this.output);
    this.makeRoom(isAfterPause);
    source.start(this.endTime);
    this.endTime += buffer.duration;
    this.seconds += buffer.duration;
  }

  /** If everything before it has been played, schedule it a little later, as the next chunk may be late, too. */
  makeRoom(isAfterPause) {
    const now = this.context.currentTime;
    if (this.endTime >= now && this.seconds > 0) {
      return;
    }
    if (this.seconds > 0 && !isAfterPause) {
      this.gaps += 1;
      this.lead = Math.min(1, this.lead * 2);
    }
    this.endTime = now + this.lead;
  }

  /** Seconds that have been played. */
  position() {
    const left = this.endTime - (this.context?.currentTime ?? 0);
    this.heard = Math.max(this.heard, Math.min(this.seconds, this.seconds - left));
    return this.heard;
  }

  isPlaying() {
    return this.context !== null && this.seconds > 0 && this.context.currentTime < this.endTime;
  }

  silence() {
    this.output?.disconnect();  // stops all scheduled chunks
    this.output = null;
    this.endTime = Math.min(this.endTime, this.context?.currentTime ?? 0);
  }
}


/* ---- The waveform: grows to the right, then shrinks to fit; the played part has another colour */

class Waveform {
  static PEAK_SECONDS = 0.01;
  static LEAST_SPAN = 6;  // seconds
  static BAR = 3;         // pixels, including the space beside it

  constructor(canvas) {
    this.canvas = canvas;
    this.clear();
    new ResizeObserver(() => this.draw(this.played)).observe(canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw(this.played));
  }

  clear() {
    this.peaks = [];    // the loudest sample of each 10 ms, from 0 to 1
    this.length = 0;    // samples
    this.played = 0;    // seconds
  }

  add(samples) {
    const perPeak = RATE * Waveform.PEAK_SECONDS;
    for (const sample of samples) {
      const i = Math.floor(this.length / perPeak);
      this.peaks[i] = Math.max(this.peaks[i] ?? 0, Math.abs(sample) / 32768);
      this.length += 1;
    }
  }

  draw(played) {
    this.played = played;
    const { clientWidth: width, clientHeight: height } = this.canvas;
    const scale = window.devicePixelRatio || 1;
    if (this.canvas.width !== Math.round(width * scale)) {
      this.canvas.width = Math.round(width * scale);
      this.canvas.height = Math.round(height * scale);
    }
    const pen = this.canvas.getContext("2d");
    const style = getComputedStyle(this.canvas);
    const fill = (colour, ...place) => {
      pen.fillStyle = style.getPropertyValue(colour);
      pen.fillRect(...place);
    };
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    const span = Math.max(Waveform.LEAST_SPAN, this.length / RATE);

    const step = [1, 2, 5, 10, 30, 60, 120].find((seconds) => span / seconds <= 8) ?? 300;
    pen.font = `11px ${style.getPropertyValue("--mono")}`;
    pen.textBaseline = "bottom";
    for (let second = 0; second < span; second += step) {
      const x = Math.round((second / span) * width);
      fill("--line", x, height - 14, 1, 14);
      pen.fillStyle = style.getPropertyValue("--muted");
      pen.fillText(`${second} s`, x + 5, height);
    }

    const bars = Math.floor(width / Waveform.BAR);
    const perBar = span / bars / Waveform.PEAK_SECONDS;
    const room = height - 20;  // above the scale
    for (let bar = 0; bar < bars; bar += 1) {
      const from = Math.floor(bar * perBar);
      const peaks = this.peaks.slice(from, Math.max(from + 1, Math.floor((bar + 1) * perBar)));
      const isHeard = (bar / bars) * span < played;
      const colour = peaks.length === 0 ? "--line" : isHeard ? "--accent" : "--waiting";
      const size = peaks.length === 0 ? 1 : Math.max(2, Math.max(...peaks) * room);
      fill(colour, bar * Waveform.BAR, (room - size) / 2, Waveform.BAR - 1, size);
    }
  }
}


/* ---- The current speech: player, waveform and figures */

const speech = {
  player: new Player(),
  waveform: new Waveform($("waveform")),
  pieces: [],         // all samples
  parts: [],          // of each its text, button, start and end in seconds; the end once it is known
  inHistory: {},      // how many pieces, parts and seconds have been added to the history
  about: {},          // text, voice and seed
  hasNewText: false,  // text was sent since the last chunk
  asked: 0,           // when the request was sent
  lastChunk: 0,       // when the last chunk arrived
  isArriving: false,
  isDrawing: false,   // repeatedly, until all has been played
  hasSpeed: true,     // false if the speed depends on how fast the user types

  /** Call this from a click or key event, as Player.prepare. */
  begin(about, { hasSpeed = true } = {}) {
    this.about = about;
    this.hasNewText = false;
    this.player.prepare();
    this.waveform.clear();
    this.pieces = [];
    this.parts = [];
    this.inHistory = { pieces: 0, parts: 0, seconds: 0 };
    $("parts").replaceChildren();
    this.asked = performance.now();
    this.firstAudio = null;
    this.hasSpeed = hasSpeed;
    this.isArriving = true;
    for (const id of ["first-audio", "real-time", "seconds", "gaps"]) {
      showFigure(id, NONE);
    }
    this.show("Waiting for the first audio.");
  },

  /** Continue the speech that is still being played. */
  resume(about) {
    this.about = this.isArriving ? this.about : about;
    this.isArriving = true;
    this.show("Speaking.");
  },

  /** chunk: an ArrayBuffer with whole samples */
  add(chunk) {
    const samples = new Int16Array(chunk);
    this.lastChunk = performance.now();
    if (this.firstAudio === null) {
      this.firstAudio = this.lastChunk - this.asked;
      showStatus("Speaking.");
    }
    this.pieces.push(samples);
    this.player.add(samples, this.hasNewText);
    this.hasNewText = false;
    this.waveform.add(samples);
    this.showFigures();
  },

  /** Call this before the audio of the part is added. */
  addPart(text, start) {
    const button = element("button", { type: "button", onclick: () => this.playFrom(start) },
      element("small", { ariaHidden: "true" }, clock(start)), text);
    $("parts").append(element("li", {}, button));
    this.parts.push({ text, start, end: null, button });
  },

  /** Complete the last part, whose text may have been arriving until now. */
  endPart(text, end) {
    const part = this.parts.at(-1);
    part.button.lastChild.textContent = text;
    Object.assign(part, { text, end });
  },

  playFrom(seconds) {
    if (this.pieces.length === 0) {
      return;  // its audio has not arrived yet
    }
    const samples = new Int16Array(this.waveform.length);
    let place = 0;
    for (const piece of this.pieces) {
      samples.set(piece, place);
      place += piece.length;
    }
    const first = Math.min(Math.round(seconds * RATE), samples.length - 1);
    this.player.seek(first / RATE, samples.subarray(first));
    this.show(this.isArriving ? "Speaking." : this.summary());
  },

  /** Mark the part that is being played, until the next one begins. */
  showHeard(position) {
    const heard = isActive() ? this.parts.findLast(({ start }) => start < position)?.button : null;
    const shown = $("parts").querySelector("[aria-current]");
    if (heard !== shown) {
      shown?.removeAttribute("aria-current");
      heard?.setAttribute("aria-current", "true");
      $("parts").scrollTop = heard ? heard.offsetTop - $("parts").clientHeight / 2 : $("parts").scrollTop;
    }
  },

  /** No more audio will arrive; what has arrived is still played. */
  end() {
    this.isArriving = false;
    this.addToHistory();
    $("waveform").setAttribute("aria-label", `Waveform of ${this.player.seconds.toFixed(1)} seconds of speech`);
    showStatus(this.player.seconds ? this.summary() : "No audio came.");
  },

  /** Add what has arrived since the last call. */
  addToHistory() {
    const { pieces, parts, seconds } = this.inHistory;
    this.inHistory = { pieces: this.pieces.length, parts: this.parts.length, seconds: this.player.seconds };
    if (this.pieces.length === pieces) {
      return;
    }
    const cues = this.parts.slice(parts).map(({ text, start, end }, i) => {
      const next = this.parts[parts + i + 1]?.start ?? this.player.seconds;  // without an end it was stopped
      return { text, start: start - seconds, end: (end ?? next) - seconds };
    });
    spoken.add({ ...this.about, parts: cues }, wavFile(this.pieces.slice(pieces)));
  },

  stop(reason) {
    this.player.silence();
    this.end();
    showStatus(reason);
    showButton(false);
  },

  summary() {
    const [seconds, speed] = [this.player.seconds, this.speed()];
    let pace = "";
    if (this.hasSpeed && speed < 1) {
      pace = `, made more slowly than it is heard: ${(1 / speed).toFixed(1)} s for each second`;
    } else if (this.hasSpeed) {
      pace = `, made at ${speed.toFixed(1)} times real time`;
    }
    return `${seconds.toFixed(1)} s of speech, the first after ${Math.round(this.firstAudio)} ms${pace}.`;
  },

  speed() {
    return this.player.seconds / Math.max(0.001, (this.lastChunk - this.asked) / 1000);
  },

  showFigures() {
    showFigure("first-audio", Math.round(this.firstAudio), "ms");
    if (this.hasSpeed) {
      showFigure("real-time", this.speed().toFixed(1), "\u00d7");
    }
    showFigure("seconds", this.player.seconds.toFixed(1), "s");
    showFigure("gaps", this.player.gaps);
  },

  show(status) {
    showStatus(status);
    showButton(true);
    if (!this.isDrawing) {
      this.draw();
    }
  },

  /** Show how much has been played. Screen readers read only the status. */
  showProgress() {
    const { seconds, heard } = this.player;
    const made = this.isArriving ? ` of ${Math.floor(seconds)} s made so far` : ` of ${Math.round(seconds)} s`;
    showStatus(isActive() && seconds > 0 ? `${Math.floor(heard)} s heard${made}.` : "", "progress");
  },

  draw() {
    const position = this.player.position();
    this.waveform.draw(position);
    this.showHeard(position);
    this.showProgress();
    this.isDrawing = isActive();
    if (!this.isDrawing) {
      showButton(false);
    } else if (reducedMotion.matches) {
      setTimeout(() => this.draw(), 500);
    } else {
      requestAnimationFrame(() => this.draw());
    }
  },
};

const reducedMotion = matchMedia("(prefers-reduced-motion: reduce)");
const isActive = () => speech.isArriving || speech.player.isPlaying();

/** The main button starts or stops the speech. */
function showButton(stops) {
  const [name, shown, keys] = stops ? ["Stop", "Esc", "Escape"] : ["Speak", "Ctrl Enter", "Control+Enter"];
  $("speak").replaceChildren(name, element("kbd", { ariaHidden: "true" }, shown));
  $("speak").ariaKeyShortcuts = keys;
}

const NONE = "\u2013";  // a dash for an unknown figure

function showFigure(id, value, unit = "") {
  $(id).replaceChildren(String(value), element("small", {}, unit));
  $(id).classList.toggle("empty", value === NONE);
}


/* ---- The history: kept in this browser, also after a reload */

const MOST_KEPT = 20;

const spoken = {
  database: null,

  async load() {
    this.database = await new Promise((resolve, reject) => {
      const opening = indexedDB.open("qwen3-tts", 1);
      opening.onupgradeneeded = () => opening.result.createObjectStore("spoken", { keyPath: "id", autoIncrement: true });
      opening.onsuccess = () => resolve(opening.result);
      opening.onerror = reject;
    });
    (await this.access("readonly", (store) => store.getAll())).forEach((entry) => this.show(entry));
  },

  access(mode, step) {
    return new Promise((resolve, reject) => {
      const transaction = this.database.transaction("spoken", mode);
      const request = step(transaction.objectStore("spoken"));
      transaction.oncomplete = () => resolve(request.result);  // now it survives a reload
      transaction.onabort = () => reject(transaction.error);
    });
  },

  async add(about, wav) {
    const entry = { ...about, wav };
    const item = this.show(entry);
    if (this.database) {
      entry.id = await this.access("readwrite", (store) => store.add(entry));
    }
    item.entry = entry;
    if ($("spoken").children.length > MOST_KEPT) {
      await this.remove($("spoken").lastChild);
    }
  },

  show(entry) {
    const named = (name) => `${name}: ${entry.text.slice(0, 60)}`;
    const button = (name, action, shown = name) => element("button",
      { type: "button", ariaLabel: named(name), onclick: () => action().catch((error) => showError(error)) }, shown);
    const saveSrt = async () => save(subtitles(entry.parts), "speech.srt");
    const item = element("li", { entry },
      element("p", {}, entry.text),
      element("p", { className: "hint" }, `${entry.voice ? `voice ${entry.voice}, ` : ""}seed ${entry.seed}`),
      element("audio", { controls: true, src: URL.createObjectURL(entry.wav), ariaLabel: named("Speech") }),
      element("div", { className: "actions" },
        button("Save WAV", async () => save(entry.wav, "speech.wav")),
        button("Save MP3", async () => save(await toMp3(entry.wav), "speech.mp3"), "MP3"),
        ...(entry.parts?.length ? [button("Save SRT", saveSrt, "SRT")] : []),
        button("Forget", () => this.remove(item))));
    $("spoken").prepend(item);
    return item;
  },

  async remove(item) {
    if (this.database && item.entry.id !== undefined) {
      await this.access("readwrite", (store) => store.delete(item.entry.id));
    }
    URL.revokeObjectURL(item.querySelector("audio").src);
    item.remove();
  },
};

function save(blob, name) {
  const link = element("a", { href: URL.createObjectURL(blob), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
}

/** Seconds as 3:05; with milliseconds as subtitles have them, 00:03:05,250. */
function clock(seconds, isExact = false) {
  const time = new Date(Math.round(1000 * seconds)).toISOString();
  return isExact ? time.slice(11, 23).replace(".", ",") : time.slice(11, 19).replace(/^[0:]{1,4}/, "");
}

function subtitles(parts) {
  const cues = parts.map(({ text, start, end }, i) =>
    `${i + 1}\n${clock(start, true)} --> ${clock(end, true)}\n${text.trim().replace(/\s*\n\s*/g, "\n")}\n\n`);
  return new Blob(cues, { type: "application/x-subrip" });
}

/** Encoded by the server, as browsers have no encoder for MP3. */
async function toMp3(wav) {
  const response = await call("v1/audio/convert?response_format=mp3", { method: "POST", body: wav });
  return response.blob();
}


/* ---- Speak: one text over HTTP */

let lastRequest = new AbortController();  // the AbortController of the last request

async function speak() {
  stopAll("");
  clearError();
  if (!$("voice").value && server.models.length) {
    throw mistake("There is no voice yet: record one, or choose a file", "voice");
  }
  const request = lastRequest = new AbortController();
  const fields = { ...speechFields(), ...fieldsWithSeed() };
  speech.begin({ text: fields.input, voice: fields.voice, seed: fields.seed });
  try {
    const response = await call("v1/audio/speech", {
      method: "POST",
      headers: { "Content-Type": "application/json" },
      body: JSON.stringify({ ...fields, response_format: "pcm", stream_format: "sse" }),
      signal: request.signal,
    });
    for await (const { audio, part, parts, error } of eventsOf(response)) {
      request.signal.throwIfAborted();
      if (error) {
        throw mistake(error.message, error.param);
      }
      if (part) {
        speech.addPart(part.text, part.start_seconds);
      }
      if (audio) {  // empty while the encoder buffers all audio of the part
        speech.add(Uint8Array.from(atob(audio), (byte) => byte.charCodeAt(0)).buffer);
      }
      parts?.forEach(({ end_seconds }, i) => { speech.parts[i].end = end_seconds; });
    }
    speech.end();
  } catch (error) {
    if (!request.signal.aborted) {
      fail(error);
    }
  }
}

/** Server-sent events. A piece from the network may end within an event. The last event has the times of all parts. */
async function* eventsOf(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const read = () => reader.read().catch(() => ({ done: true }));
  let [rest, isComplete] = ["", false];
  for (let piece = await read(); !piece.done; piece = await read()) {
    const events = (rest + piece.value).split("\n\n");
    rest = events.pop();
    for (const event of events.map((text) => JSON.parse(text.slice("data: ".length)))) {
      isComplete = event.type === "speech.audio.done";
      yield event;
    }
  }
  if (!isComplete) {
    throw new Error("The server broke off the speech: its log says why");
  }
}

/** Stop the playback, and the request or the WebSocket that it comes from. */
function stopAll(reason) {
  const wasBusy = isActive();
  lastRequest.abort();
  live.close();
  if (wasBusy) {
    speech.stop(reason);
  }
}

function fail(error) {
  stopAll("Stopped by an error.");
  showError(error);
}


/* ---- Speak as you type: words over a WebSocket while they are typed */

const live = {
  socket: null,
  opened: null,      // a Promise that messages wait for
  isWriting: false,  // whether an utterance has begun and not ended
  unspoken: 0,       // number of utterances whose audio is not complete
  start: 0,          // seconds of audio before the current utterance
  timer: 0,

  /** Send complete words: up to the last space, or character of a script without spaces. Returns the rest. */
  sendWords(text) {
    const words = text.match(/^[^]*[\s\u3000-\u30ff\u3400-\u9fff\uff00-\uffef]/)?.[0] ?? "";
    if (words.trim()) {
      this.write(words);
    }
    this.restartTimer(TYPING_PAUSE, () => this.finish());
    return text.slice(words.length);
  },

  write(words) {
    if (!this.isWriting) {
      this.begin();
    }
    this.send({ type: "input.text", text: words });
    speech.about.text += words;
    $("said").textContent += words;
    $("said").scrollTop = $("said").scrollHeight;
  },

  begin() {
    clearError();
    const fields = fieldsWithSeed();
    const about = { text: "", voice: fields.voice, seed: fields.seed };
    if (!speech.hasSpeed && isActive()) {
      speech.resume(about);  // the next sentence follows the previous one
    } else {
      lastRequest.abort();
      speech.begin(about, { hasSpeed: false });
      $("said").textContent = "";
    }
    this.connect();
    this.isWriting = true;
    this.unspoken += 1;
    this.send({ type: "session.config", ...fields, response_format: "pcm" });
  },

  finish() {
    const rest = $("live").value;
    $("live").value = "";
    if (rest.trim()) {
      this.write(rest);
    }
    if (this.isWriting) {
      this.isWriting = false;
      this.send({ type: "input.done" });
      $("said").textContent += "\n";
    }
    this.restartTimer(IDLE_CLOSE, () => this.unspoken === 0 && this.close());
  },

  connect() {
    if (this.socket) {
      return;
    }
    const socket = this.socket = openWebSocket("v1/audio/speech/stream");
    let wasOpen = false;
    socket.binaryType = "arraybuffer";
    this.opened = new Promise((resolve) => { socket.onopen = resolve; });
    this.opened.then(() => { wasOpen = true; });
    socket.onmessage = ({ data }) => typeof data === "string" ? this.receive(JSON.parse(data)) : speech.add(data);
    socket.onclose = () => this.connectionLost(wasOpen);
  },

  send(message) {
    const { socket } = this;
    speech.hasNewText = true;
    this.opened.then(() => socket.send(JSON.stringify(message)));
  },

  receive(message) {
    if (message.type === "error") {
      fail(mistake(message.message, message.param === "input" ? "live" : message.param));
    } else if (message.type === "audio.start") {
      this.start = message.sentence_index === 0 ? speech.player.seconds : this.start;
      if (message.sentence_text.trim()) {  // else it is a pause
        speech.addPart(`${message.sentence_text.trim()} \u2026`, this.start + message.start_seconds);
      }
    } else if (message.type === "audio.done" && message.sentence_text.trim()) {
      speech.endPart(message.sentence_text, this.start + message.end_seconds);
    } else if (message.type === "session.done") {
      this.unspoken -= 1;
      if (this.unspoken === 0) {
        speech.end();
      }
      if (message.unspoken_characters) {
        showError(mistake(`the speech ended at max_new_tokens, and the last ${message.unspoken_characters} characters ` +
          "of the text were not spoken: raise it, or leave it empty", "max_new_tokens"));
      }
    }
  },

  /** The server has closed the connection or refused it. A browser does not say why, so find out over HTTP. */
  async connectionLost(wasOpen) {
    const wasBusy = this.unspoken > 0;
    this.close();
    if (wasBusy) {
      const reason = wasOpen ? null : await call("v1/models").then(() => null, (error) => error);
      fail(reason ?? new Error("The connection was closed before the speech was complete"));
    }
  },

  /** Drop all unfinished utterances. The server frees their place when the connection closes. */
  close() {
    clearTimeout(this.timer);
    if (this.socket) {
      this.socket.onmessage = this.socket.onclose = null;
      this.socket.close();
    }
    this.socket = null;
    this.isWriting = false;
    this.unspoken = 0;
  },

  restartTimer(milliseconds, then) {
    clearTimeout(this.timer);
    this.timer = setTimeout(then, milliseconds);
  },
};

/* ---- The fields of a request */

const NUMBERS = ["speed", "seed", "temperature", "top_p", "top_k", "repetition_penalty", "max_new_tokens"];
const SWITCHES = { script: true, notation: false, limit_speech: true };  // field -> its value when the box is checked

/** All fields except the text. Empty ones are left out, so that the model's defaults apply. */
function styleFields() {
  const fields = {};
  for (const name of ["voice", "instructions", "language", ...NUMBERS]) {
    const text = $(name).value.trim();
    const isDefault = text === "" || (name === "speed" && text === "1");
    if (!isDefault && !$(name).closest("[hidden]")) {
      fields[name] = NUMBERS.includes(name) ? toNumber(text) : text;
    }
  }
  for (const [name, value] of Object.entries(SWITCHES)) {
    if ($(name).checked) {
      fields[name] = value;
    }
  }
  const lexicon = readLexicon();
  return lexicon.length ? { ...fields, lexicon: Object.fromEntries(lexicon) } : fields;
}

/** Lines as in the server's lexicon: a word, a tab and how to say it. Also with =, as a tab is hard to type here. */
function readLexicon() {
  const lines = $("lexicon").value.split("\n").filter((line) => line.trim() && !line.trim().startsWith("#"));
  return lines.map((line) => line.match(/^([^\t=]*)[\t=]?([^]*)$/).slice(1).map((text) => text.trim()));
}

/** A number, or the text if it is none: the server's error then says what it should be. */
function toNumber(text) {
  const value = Number(text);
  const isExact = Number.isFinite(value) && (!Number.isInteger(value) || Number.isSafeInteger(value));
  return isExact ? value : text;
}

/** With a random seed if none was given. The history shows it, so that the speech can be repeated. */
function fieldsWithSeed() {
  const wrong = readLexicon().find(([word, said]) => !word || !said);
  if (wrong) {
    throw mistake(`the lexicon has ${wrong.join(" = ")}: write word = how to say it`, "lexicon");
  }
  return { seed: Math.floor(Math.random() * 2 ** 32), ...styleFields() };
}

/** Without a model: the server chooses the model for each voice of a script. */
function speechFields() {
  return { input: $("text").value, ...styleFields() };
}


/* ---- The request as curl and as Python */

function showRequest() {
  const characters = [...$("text").value].length;
  const most = chosenModel()?.max_text ?? Infinity;
  $("characters").textContent = `${grouped(characters)}${most < Infinity ? ` of ${grouped(most)}` : ""} characters`;
  $("characters").classList.toggle("too-many", characters > most);
  $("speed-shown").textContent = `${$("speed").value}\u00d7`;
  const kind = document.querySelector("input[name=as]:checked").value;
  $("request").textContent = kind === "curl" ? asCurl(speechFields()) : asPython(speechFields());
}

const grouped = (number) => number.toLocaleString("en");
const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;  // for a shell

function asCurl(fields) {
  const body = JSON.stringify({ ...fields, response_format: "wav" }, null, 2).replaceAll("\n", "\n  ");
  const lines = [
    `curl ${quoted(`${BASE}v1/audio/speech`)}`,
    '  -H "Content-Type: application/json"',
    ...(server.needsKey ? [`  -H "Authorization: Bearer $${KEY_VARIABLE}"`] : []),
    `  -d ${quoted(body)}`,
    "  -o speech.wav",
  ];
  return lines.join(" \\\n");
}

/** Strings, numbers and objects in JSON are also valid in Python; booleans are not. */
const asLiteral = (value) => typeof value === "boolean" ? (value ? "True" : "False") : JSON.stringify(value);

function asPython({ input, voice, instructions, speed, ...others }) {
  const model = "tts-1";  // any name: the client requires one
  const known = { model, voice: voice ?? "alloy", input, instructions, speed, response_format: "wav" };
  const given = Object.entries(known).filter(([, value]) => value !== undefined);
  const extra = Object.entries(others).map(([name, value]) => `        "${name}": ${asLiteral(value)},`);
  const lines = [
    ...(server.needsKey ? ["import os", ""] : []),
    "from openai import OpenAI",
    "",
    "client = OpenAI(",
    `    base_url=${JSON.stringify(`${BASE}v1`)},`,
    `    api_key=${server.needsKey ? `os.environ["${KEY_VARIABLE}"]` : '"none"'},`,
    ")",
    "speech = client.audio.speech.with_streaming_response",
    "with speech.create(",
    ...given.map(([name, value]) => `    ${name}=${JSON.stringify(value)},`),
    ...(extra.length ? ["    extra_body={", ...extra, "    },"] : []),
    ") as response:",
    '    response.stream_to_file("speech.wav")',
  ];
  return lines.join("\n");
}

async function copyRequest() {
  const text = $("request").textContent;
  try {
    await navigator.clipboard.writeText(text);
  } catch {  // only pages over HTTPS or from localhost can use the clipboard
    getSelection().selectAllChildren($("request"));
    document.execCommand("copy");
    getSelection().removeAllRanges();
  }
  $("copy").textContent = "Copied";
  showStatus("The request was copied.");
  setTimeout(() => { $("copy").textContent = "Copy"; }, 2000);
}


/* ---- Voices */

const server = { models: [], needsKey: false, voices: [] };

/** The model that has the chosen voice. */
function chosenModel() {
  return server.models.find(({ voices }) => voices.includes($("voice").value)) ?? server.models[0];
}

async function loadVoices(chosen = recall("voice")) {
  server.models = (await (await call("v1/models")).json()).data;
  server.needsKey = apiKey() !== "";
  $("add-voice").hidden = !server.models.some(({ kind }) => kind === "base");
  const { voices } = await (await call("v1/audio/voices")).json();
  server.voices = voices;
  $("voice").replaceChildren(...voices.map(({ id, name }) => new Option(name, id)));
  if (voices.length === 0) {
    $("voice").append(new Option("none yet: add one", ""));
    $("add-voice").open = true;
  }
  if (voices.some(({ id }) => id === chosen)) {
    $("voice").value = chosen;
  }
  showVoice();
}

/** The chosen voice determines the model, and the model which fields are available. */
function showVoice() {
  const model = chosenModel();
  $("model").textContent = model.id;
  document.title = `${model.id} \u2013 speech`;
  $("noise").hidden = !model.random_weights;
  $("instructions-field").hidden = model.kind === "base";
  $("instructions-label").textContent = model.kind === "voice_design" ? "Describe the voice" : "Style instructions";
  const language = recall("language");
  const languages = (model.languages ?? []).filter((name) => name !== "auto");
  $("language").replaceChildren(new Option("auto", ""), ...languages.map((name) => new Option(name)));
  $("language").value = languages.includes(language) ? language : "";
  const voice = server.voices.find(({ id }) => id === $("voice").value);
  $("remove-voice").hidden = voice?.kind !== "registered";
  $("remove-voice").ariaLabel = `Remove the voice ${voice?.name}`;
  remember("voice", $("voice").value || recall("voice"));
  $("live-wait").hidden = !voice?.ref_text;
  showRequest();
}

async function removeVoice() {
  const name = $("voice").value;
  if (confirm(`Remove the voice ${name} from the server?`)) {
    await call(`v1/audio/voices/${encodeURIComponent(name)}`, { method: "DELETE" }).catch((error) => {
      if (error.status !== 404) {  // somebody else has removed it
        throw error;
      }
    });
    await loadVoices();
    showStatus(`The voice ${name} was removed.`);
    $("voice").focus();
  }
}

let sample = null;  // the recording of the voice to add: a File

/** A name that the server accepts: My Voice becomes my-voice. Letters other than a to z get the server's error. */
function voiceName() {
  const plain = $("voice-name").value.normalize("NFKD").replace(/\p{M}/gu, "").toLowerCase();
  return plain.replace(/[^\p{L}\p{N}_]+/gu, "-").replace(/^[-_]+|-+$/g, "") || $("voice-name").value.trim();
}

function showName() {
  const name = voiceName();
  const isChanged = name !== $("voice-name").value;
  $("name-hint").textContent = isChanged ? `It will be called ${name}.` : "Letters a to z, digits, - and _, at most 64.";
}

async function addVoice() {
  if (!sample) {
    throw mistake("There is no recording yet: record one, or choose a file", "audio_sample");
  }
  if (!voiceName()) {
    throw mistake("The voice has no name yet: give it one", "name");
  }
  const form = new FormData();
  form.append("name", voiceName());
  form.append("ref_text", $("transcript").value);
  form.append("audio_sample", sample);
  showStatus("Adding it.", "voice-status");
  const voice = await (await call("v1/audio/voices", { method: "POST", body: form })).json();
  await loadVoices(voice.id);
  $("voice-form").reset();
  showName();
  setSample(null);
  showStatus(`The voice ${voice.name} was added and chosen.`, "voice-status");
}

function setSample(file) {
  sample = file;
  URL.revokeObjectURL($("sample").src);
  $("sample").hidden = !file;
  if (file) {
    $("sample").src = URL.createObjectURL(file);
  }
}

/** Every server reads WAV, FLAC, OGG and MP3. Other formats that the browser knows, such as M4A, are converted here. */
async function takeFile(file) {
  setSample(!file || /\.(wav|flac|ogg|mp3)$/i.test(file.name) ? file : await toWav(file));
}

async function toWav(blob) {
  const decoder = new OfflineAudioContext(1, 1, RATE);
  const audio = await decoder.decodeAudioData(await blob.arrayBuffer()).catch(() => {
    throw mistake("This file is not audio that the browser can read: give a WAV, FLAC, OGG, MP3 or M4A file", "audio_sample");
  });
  const mono = new Float32Array(audio.length);
  for (let channel = 0; channel < audio.numberOfChannels; channel += 1) {
    audio.getChannelData(channel).forEach((value, i) => { mono[i] += value / audio.numberOfChannels; });
  }
  const samples = Int16Array.from(mono, (sample) => Math.max(-1, Math.min(1, sample)) * 32767);
  return new File([wavFile([samples])], "voice.wav");
}


/* ---- Recording */

let recorder = null;  // the MediaRecorder while it records

async function record() {
  if (recorder) {
    recorder.stop();
    return;
  }
  if (!navigator.mediaDevices?.getUserMedia) {
    throw new Error("Browsers record only on pages over HTTPS or from this machine: choose a file instead");
  }
  stopAll("Stopped.");
  const plain = { echoCancellation: false, noiseSuppression: false, autoGainControl: false };
  const stream = await navigator.mediaDevices.getUserMedia({ audio: plain }).catch(() => {
    throw new Error("The microphone cannot be used: allow it for this page, or choose a file instead");
  });
  setSample(null);
  $("file").value = "";
  const pieces = [];
  recorder = new MediaRecorder(stream);
  recorder.ondataavailable = ({ data }) => pieces.push(data);
  recorder.onstop = () => endRecording(stream, new Blob(pieces)).catch(showError);
  recorder.start();
  showLevel(stream);
  showRecording(true);
}

async function endRecording(stream, blob) {
  recorder = null;
  stream.getTracks().forEach((track) => track.stop());  // also removes the browser's recording indicator
  showRecording(false);
  setSample(await toWav(blob));
  showStatus("Recorded.", "voice-status");
}

function showRecording(isRecording) {
  $("record").textContent = isRecording ? "Stop recording" : "Record again";
  $("record").ariaLabel = isRecording ? "Stop recording" : null;  // screen readers should not read the seconds
  $("level").hidden = !isRecording;
  showStatus(isRecording ? "Recording." : "", "voice-status");
}

/** Show time and loudness until the recording ends. */
function showLevel(stream) {
  const context = new AudioContext();
  const analyser = context.createAnalyser();
  context.createMediaStreamSource(stream).connect(analyser);
  const samples = new Float32Array(analyser.fftSize);
  const began = performance.now();
  const timer = setInterval(() => {
    if (!recorder) {
      clearInterval(timer);
      context.close();
      return;
    }
    const seconds = (performance.now() - began) / 1000;
    analyser.getFloatTimeDomainData(samples);
    $("level").value = Math.min(1, 3 * Math.sqrt(samples.reduce((sum, value) => sum + value * value, 0) / samples.length));
    $("record").textContent = `Stop recording (${Math.floor(seconds)} s)`;
    if (seconds > (server.models[0]?.max_reference_seconds ?? 60) - 1) {
      recorder.stop();
    }
  }, 100);
}


/* ---- Start */

/** The page may be open before the model is loaded. A status that the user's own actions show is not overwritten. */
async function waitUntilReady() {
  let shown = $("status").textContent;
  const show = (text) => {
    if ($("status").textContent === shown) {
      showStatus(shown = text);
    }
  };
  for (let seconds = 1; ; seconds = Math.min(10, 2 * seconds)) {
    try {
      await call("health");
      show("Ready.");
      return;
    } catch (error) {
      if (error.status !== 503) {
        throw error;
      }
      show(asSentence(error.message));
    }
    await new Promise((resolve) => setTimeout(resolve, 1000 * seconds));
  }
}

async function connect() {
  clearError();
  try {
    await loadVoices();
    await waitUntilReady();
  } catch (error) {
    $("model").textContent = "not connected";
    showError(error);
  }
}

/** addEventListener with a handler whose errors are shown next to the element. */
function on(id, event, handler) {
  $(id).addEventListener(event, async (details) => {
    try {
      await handler(details);
    } catch (error) {
      showError(error, $(id));
    }
  });
}

document.addEventListener("submit", (event) => event.preventDefault());  // this script sends the forms
on("speak-form", "submit", () => isActive() ? stopAll("Stopped.") : speak());
on("live-form", "submit", () => live.finish());
on("voice-form", "submit", () => addVoice().catch((error) => {
  showStatus("Not added.", "voice-status");
  throw error;
}));
on("key-form", "submit", () => {
  remember("key", $("key").value.trim(), "sessionStorage");
  $("key").value = "";
  return connect();
});

const SETTINGS = ["instructions", "lexicon", ...Object.keys(SWITCHES)];
const REMEMBERED = ["text", "speed", "language", ...SETTINGS];  // besides the voice

on("copy", "click", copyRequest);
on("voice-name", "input", showName);
on("voice", "change", showVoice);
on("remove-voice", "click", removeVoice);
on("record", "click", record);
on("file", "change", () => takeFile($("file").files[0] ?? null));
on("live", "input", (event) => {
  if (!event.isComposing) {
    $("live").value = live.sendWords($("live").value);
  }
});
on("live", "compositionend", () => { $("live").value = live.sendWords($("live").value); });
on("text", "keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    return speak();
  }
});

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") {
    stopAll("Stopped.");
  }
});
document.addEventListener("play", ({ target }) => {  // one sound at a time
  stopAll("Stopped.");
  document.querySelectorAll("audio").forEach((other) => other === target || other.pause());
}, true);
document.addEventListener("input", ({ target }) => {
  if (REMEMBERED.includes(target.id)) {
    remember(target.id, target.type !== "checkbox" ? target.value : target.checked ? "on" : "");
  }
  if (target.matches("[aria-invalid]")) {
    clearError();
  }
  showRequest();
});
document.addEventListener("change", showRequest);
document.addEventListener("click", ({ target }) => target.closest("button") && clearError(), true);

for (const id of ["text", "speed", "instructions", "lexicon"]) {
  $(id).value = recall(id) || $(id).value;
}
for (const id of Object.keys(SWITCHES)) {
  $(id).checked = recall(id) === "on";
}
$("settings").open = SETTINGS.some((id) => recall(id) !== "");
showButton(false);
showName();
showRequest();
spoken.load().catch(() => {});  // in a private window, for example, the history is kept until it is closed
connect();
