// Sends chat and completion requests to the server of this page. Model output is shown as plain text, never as HTML.
"use strict";

const element = (id) => document.getElementById(id);
const CONNECTION_LOST = "The connection to the server is lost.";

let model = null; // the entry in /v1/models
let messages = [];
let abortController = null; // of the response that is being generated

// ---------------------------------------------------------------- requests
async function request(path, body, signal) {
  const headers = { "Content-Type": "application/json" };
  const key = String.fromCharCode(...new TextEncoder().encode(element("api-key").value)); // `fetch` rejects others
  if (key) headers.Authorization = `Bearer ${key}`;
  const options = body === undefined ? { headers } : { method: "POST", headers, body: JSON.stringify(body), signal };
  const response = await fetch(path, options);
  if (response.ok) return response;
  const content = await response.json().catch(() => null);
  throw new Error(content?.error?.message ?? `The server responded with status ${response.status}.`);
}

async function* readEvents(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Error(CONNECTION_LOST); // a complete stream ends with [DONE] below
    buffer += value;
    const blocks = buffer.split("\n\n");
    buffer = blocks.pop();
    for (const block of blocks) {
      if (block === "data: [DONE]") return;
      const event = JSON.parse(block.slice("data: ".length));
      if (event.error) throw new Error(event.error.message);
      yield event;
    }
  }
}

async function* generateText(prompt, signal) {
  const maxTokens = Math.max(1, Math.round(Number(element("max-tokens").value)) || 512);
  const settings = { stream: true, max_tokens: maxTokens };
  if (element("temperature").value !== "") settings.temperature = Number(element("temperature").value);
  const isChat = model.kind === "chat";
  const systemPrompt = element("system-prompt").value.trim();
  const systemMessages = systemPrompt ? [{ role: "system", content: systemPrompt }] : [];
  const body = isChat ? { ...settings, messages: [...systemMessages, ...messages] } : { ...settings, prompt };
  const response = await request(isChat ? "/v1/chat/completions" : "/v1/completions", body, signal);
  for await (const event of readEvents(response)) {
    for (const choice of event.choices) yield (isChat ? choice.delta.content : choice.text) ?? "";
  }
}

// ---------------------------------------------------------------- page
function addMessage(author, text, isUser) {
  const article = document.createElement("article");
  const heading = document.createElement("h2");
  const paragraph = document.createElement("p");
  heading.textContent = author;
  paragraph.textContent = text;
  article.classList.toggle("user", isUser);
  article.append(heading, paragraph);
  element("hint").hidden = true;
  element("messages").append(article);
  return paragraph;
}

function showError(text) {
  element("error").textContent = text;
  element("error").hidden = !text;
}

function scrollToEnd() {
  element("messages").scrollTop = element("messages").scrollHeight;
}

function setGenerating(isGenerating) {
  element("messages").setAttribute("aria-busy", String(isGenerating));
  element("send").hidden = isGenerating;
  element("stop").hidden = !isGenerating;
}

async function send() {
  const text = element("input").value;
  if (abortController || !model || (model.kind === "chat" && !text.trim())) return;
  showError("");
  element("input").value = "";
  addMessage("You", text, true);
  messages.push({ role: "user", content: text });
  const currentMessages = messages;
  const paragraph = addMessage(model.id, "", false);
  const controller = new AbortController();
  abortController = controller;
  setGenerating(true);
  scrollToEnd();
  let status = "Response complete";
  try {
    for await (const newText of generateText(text, controller.signal)) {
      const list = element("messages");
      const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
      paragraph.append(newText);
      if (isAtEnd) scrollToEnd();
    }
  } catch (error) {
    status = "Stopped";
    if (!controller.signal.aborted) {
      status = "";
      showError(error instanceof TypeError ? CONNECTION_LOST : error.message);
    }
  }
  abortController = null;
  setGenerating(false);
  if (currentMessages !== messages) return; // the user has started a new chat
  element("status").textContent = status;
  if (paragraph.textContent || status === "Response complete") {
    currentMessages.push({ role: "assistant", content: paragraph.textContent });
  } else {
    currentMessages.pop(); // without a response: return the text to the input field
    paragraph.parentElement.previousElementSibling.remove();
    paragraph.parentElement.remove();
    if (!element("input").value) element("input").value = text;
  }
  element("input").focus();
}

function startNewChat() {
  abortController?.abort();
  messages = [];
  showError("");
  element("status").textContent = "";
  for (const article of document.querySelectorAll("article")) article.remove();
  element("hint").hidden = false;
  element("input").focus();
}

async function loadModel() {
  try {
    [model] = (await (await request("/v1/models")).json()).data;
  } catch (error) {
    element("hint").textContent = "Could not load the model information.";
    showError(error instanceof TypeError ? CONNECTION_LOST : error.message);
    element("settings").open = true; // it contains the API key
    return;
  }
  showError("");
  element("model").textContent = document.title = model.id;
  if (model.kind === "encoder") {
    element("hint").textContent = "This model is an encoder. It computes embeddings (/v1/embeddings), not text.";
    return;
  }
  const isChat = model.kind === "chat";
  element("hint").textContent = isChat
    ? "Send a message to start the chat."
    : "This model has no chat template. It continues the text that you enter.";
  element("input-label").textContent = element("input").placeholder = isChat ? "Message" : "Prompt";
  element("system-prompt").hidden = element("system-prompt-label").hidden = !isChat;
  element("input").disabled = element("send").disabled = false;
  element("input").focus();
}

element("form").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
element("input").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") abortController?.abort();
});
element("stop").addEventListener("click", () => abortController.abort());
element("new-chat").addEventListener("click", startNewChat);
element("api-key").addEventListener("change", () => {
  if (!model) initialize();
});

function initialize() {
  loadModel().finally(() => (document.body.dataset.ready = "yes"));
}
initialize();
