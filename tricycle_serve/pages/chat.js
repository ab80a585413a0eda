// Talks with the server that this page came from. Whatever a model writes is shown as plain text, never as a page.
"use strict";

const place = (id) => document.getElementById(id);
const LEFT = "The connection to the server is lost.";

let model = null; // as /v1/models tells of it
let messages = [];
let stopping = null; // ends the answer that is being written

// ---------------------------------------------------------------- the server
async function ask(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  if (place("key").value) headers.Authorization = `Bearer ${place("key").value}`;
  const how = body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body), signal };
  const answer = await fetch(path, how);
  if (answer.ok) return answer;
  const about = await answer.json().catch(() => null);
  throw new Error(about?.error?.message ?? `The server answered ${answer.status}.`);
}

async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error(LEFT); // the last event ends the loop below
    held += value;
    const parts = held.split("\n\n");
    held = parts.pop();
    for (const part of parts) {
      if (part === "data: [DONE]") return;
      const event = JSON.parse(part.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function* textOf(said, signal) {
  const settings = { stream: true, max_tokens: Math.max(1, Math.round(Number(place("length").value)) || 512) };
  if (place("temperature").value !== "") settings.temperature = Number(place("temperature").value);
  const talks = model.kind === "chat";
  const system = place("system").value.trim();
  const beginning = system ? [{ role: "system", content: system }] : [];
  const body = talks ? { ...settings, messages: [...beginning, ...messages] } : { ...settings, prompt: said };
  const answer = await ask(talks ? "/v1/chat/completions" : "/v1/completions", body, signal);
  for await (const event of eventsOf(answer)) {
    for (const choice of event.choices) yield (talks ? choice.delta.content : choice.text) ?? "";
  }
}

// ---------------------------------------------------------------- the page
function show(who, text) {
  const article = document.createElement("article");
  const heading = document.createElement("h2");
  const paragraph = document.createElement("p");
  heading.textContent = who;
  paragraph.textContent = text;
  article.classList.toggle("mine", who === "You");
  article.append(heading, paragraph);
  place("hint").hidden = true;
  place("log").append(article);
  return paragraph;
}

function complain(text) {
  place("problem").textContent = text;
  place("problem").hidden = !text;
}

function follow() {
  place("log").scrollTop = place("log").scrollHeight;
}

function busy(is) {
  place("log").setAttribute("aria-busy", String(is));
  place("send").hidden = is;
  place("stop").hidden = !is;
}

async function send() {
  const said = place("said").value;
  if (stopping || !model || (model.kind === "chat" && !said.trim())) return;
  complain("");
  place("said").value = "";
  show("You", said);
  messages.push({ role: "user", content: said });
  const mine = messages;
  const paragraph = show(model.id, "");
  const abort = new AbortController();
  stopping = abort;
  busy(true);
  follow();
  let ended = "Answer complete";
  try {
    for await (const part of textOf(said, abort.signal)) {
      const atEnd = place("log").scrollHeight - place("log").scrollTop - place("log").clientHeight < 60;
      paragraph.append(part);
      if (atEnd) follow();
    }
  } catch (error) {
    ended = "Stopped";
    if (!abort.signal.aborted) {
      ended = "";
      complain(error instanceof TypeError ? LEFT : error.message);
    }
  }
  stopping = null;
  busy(false);
  if (mine !== messages) return; // a new conversation has begun
  place("state").textContent = ended;
  if (paragraph.textContent) {
    mine.push({ role: "assistant", content: paragraph.textContent });
  } else if (!ended) {
    mine.pop(); // it was not taken: give it back
    paragraph.parentElement.previousElementSibling.remove();
    paragraph.parentElement.remove();
    if (!place("said").value) place("said").value = said;
  }
  place("said").focus();
}

function anew() {
  stopping?.abort();
  messages = [];
  complain("");
  place("state").textContent = "";
  for (const article of document.querySelectorAll("article")) article.remove();
  place("hint").hidden = false;
  place("said").focus();
}

async function begin() {
  try {
    [model] = (await (await ask("/v1/models")).json()).data;
  } catch (error) {
    place("hint").textContent = "The server did not say which model it has.";
    complain(error instanceof TypeError ? LEFT : error.message);
    place("settings").open = true; // it may ask for a key
    return;
  }
  complain("");
  place("model").textContent = document.title = model.id;
  if (model.kind === "encoder") {
    place("hint").textContent = "This model writes no texts: it makes vectors of them, at /v1/embeddings.";
    return;
  }
  const talks = model.kind === "chat";
  place("hint").textContent = talks ? "Say something." : "This model continues texts; it was not taught to talk.";
  place("said-label").textContent = place("said").placeholder = talks ? "Message" : "Text to continue";
  place("system").hidden = place("system-label").hidden = !talks;
  place("said").disabled = place("send").disabled = false;
  place("said").focus();
}

place("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
place("said").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") stopping?.abort();
});
place("stop").addEventListener("click", () => stopping.abort());
place("anew").addEventListener("click", anew);
place("key").addEventListener("change", () => {
  if (!model) start();
});

function start() {
  begin().finally(() => (document.body.dataset.ready = "yes"));
}
start();
