// Talks to the server.

async function call(path, body, method = body ? "POST" : "GET") {
  const options = body ? { method, headers: { "Content-Type": "application/json" }, body: JSON.stringify(body) } : { method };
  let response;
  try {
    response = await fetch(path, options);
  } catch {
    throw new Error("The server does not answer.");
  }
  const value = await response.json().catch(() => ({}));
  if (!response.ok) throw new Error(value.error?.message || `Status ${response.status}`);
  return value;
}
